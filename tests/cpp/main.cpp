// Runs every registered test, or those whose name or file name (from the last slash on) contains the first argument.
#include <csignal>
#include <cstdio>
#include <string_view>

#include "check.h"

namespace torchddp::testing {

void report_failure(const char* file, int line, const std::string& message) {
  constexpr int64_t kMaxPrinted = 10;
  if (++outcome().num_failures <= kMaxPrinted) std::printf("%s:%d: %s\n", file, line, message.c_str());
}

namespace {

// With the slash, "/test_pack.cpp" doesn't match "/test_pack_device.cpp". Folders don't count.
std::string_view base_name(std::string_view path) {
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash);
}

bool run(const Test& test) {
  outcome() = {};
  try {
    test.body();
  } catch (const std::exception& error) {
    report_failure(test.name, 0, std::string("exception: ") + error.what());
  }
  // A test that checks nothing proves nothing.
  if (outcome().num_checks == 0) report_failure(test.name, 0, "made no check");
  const bool passed = outcome().num_failures == 0;
  std::printf("%s %s (%lld checks)\n", passed ? "ok    " : "FAILED", test.name,
              static_cast<long long>(outcome().num_checks));
  return passed;
}

}  // namespace
}  // namespace torchddp::testing

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);  // a crash must not lose earlier output
  // Whoever started this may ignore them.
  for (const int number : {SIGALRM, SIGCHLD, SIGPIPE}) std::signal(number, SIG_DFL);
  const std::string_view filter = argc > 1 ? argv[1] : "";
  int num_passed = 0;
  int num_failed = 0;
  for (const auto& test : torchddp::testing::tests()) {
    const auto matches = [&](std::string_view text) { return text.find(filter) != std::string_view::npos; };
    if (!matches(test.name) && !matches(torchddp::testing::base_name(test.file))) continue;
    ++(torchddp::testing::run(test) ? num_passed : num_failed);
  }
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 && num_passed > 0 ? 0 : 1;
}
