// A test framework in one header: TEST registers a function, CHECK* report failures without stopping, and main.cpp runs all tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace torchddp::testing {

struct Test {
  const char* file;
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> registered;
  return registered;
}

struct Registration {
  Registration(const char* file, const char* name, void (*body)()) { tests().push_back({file, name, body}); }
};

// Failures of the running test. A broken kernel fails in a million places, so only the first few are printed.
struct Outcome {
  int64_t num_checks = 0;
  int64_t num_failures = 0;
};

inline Outcome& outcome() {
  static Outcome current;
  return current;
}

void report_failure(const char* file, int line, const std::string& message);

template <class T>
void show(std::ostream& out, const T& value) {
  if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(not printable)";
  }
}

template <class A, class B>
void check_equal(const A& actual, const B& expected, const char* text, const char* file, int line) {
  ++outcome().num_checks;
  if (actual == expected) return;
  std::ostringstream message;
  message << text << ": got ";
  show(message, actual);
  message << ", expected ";
  show(message, expected);
  report_failure(file, line, message.str());
}

inline void check_true(bool value, const char* text, const char* file, int line) {
  ++outcome().num_checks;
  if (!value) report_failure(file, line, std::string("not true: ") + text);
}

// Check that the call throws Exception with all of `parts` in its text.
template <class Exception, class Call>
void check_throws(const Call& call, const std::vector<std::string_view>& parts, const char* file, int line) {
  ++outcome().num_checks;
  try {
    call();
  } catch (const Exception& error) {
    const std::string_view text = error.what();
    for (const std::string_view part : parts) {
      if (text.find(part) == std::string_view::npos) {
        report_failure(file, line, "message '" + std::string(text) + "' lacks '" + std::string(part) + "'");
      }
    }
    return;
  }
  report_failure(file, line, "nothing was thrown");
}

// The text of the exception of this type that the call throws, or "" if none.
template <class Exception, class Call>
std::string thrown_by(const Call& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::vector<std::string_view>& words) {
  return std::ranges::all_of(words, [&](const auto& word) { return text.find(word) != std::string::npos; });
}

// The concatenated parts; handles as numbers.
template <class... Parts>
std::string line_of(const Parts&... parts) {
  std::ostringstream line;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, void*>) {
      line << reinterpret_cast<intptr_t>(part);
    } else {
      line << part;
    }
  };
  (add(parts), ...);
  return line.str();
}

}  // namespace torchddp::testing

#define TEST(name)                                                                    \
  static void name();                                                                 \
  static const ::torchddp::testing::Registration name##_test(__FILE__, #name, &name); \
  static void name()

#define CHECK(condition) ::torchddp::testing::check_true((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(actual, expected) \
  ::torchddp::testing::check_equal((actual), (expected), #actual " == " #expected, __FILE__, __LINE__)
// CHECK_THROWS(std::invalid_argument, f(x), "words", "of the message")
#define CHECK_THROWS(Exception, expression, ...)                                                                \
  ::torchddp::testing::check_throws<Exception>([&] { static_cast<void>(expression); }, {__VA_ARGS__}, __FILE__, \
                                               __LINE__)
