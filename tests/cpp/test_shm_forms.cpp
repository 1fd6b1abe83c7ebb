// All-reduces that every rank sums completely, and the query before one.
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kLarge = 50'003;

// A block in the segment, and memory for the sums outside of it.
struct Apart {
  Apart(Host& host, int rank, const Spec& spec)
      : input(stamped(spec, rank, spec.numel)), output(input), expected(expected_result(spec, host.size(), rank)),
        block(static_cast<std::byte*>(host.segment(rank).allocate(std::ssize(input)))) {
    std::copy(input.begin(), input.end(), block);
    operation = {
        .type = spec.type, .numel = spec.numel, .input = block, .output = output.data(), .form = Form::kEveryone};
  }

  Operation operation;
  Bytes input, output, expected;
  std::byte* block;
};

TEST(shm_everyone_sums_to_memory_of_its_own) {
  for (const int size : {1, 2, 3, 5}) {
    Host host(size);
    check_ranks(size, [&](int rank) {
      const auto engine = host.engine(rank);
      for (const int64_t numel : {int64_t{5}, kLarge}) {
        for (const auto type : {kernels::DType::kF32, kernels::DType::kBF16}) {
          Apart apart(host, rank, {.numel = numel, .type = type});
          engine->wait(engine->start(apart.operation), kPatience);
          require(apart.output == apart.expected, "not the sum in the order of ranks");
          require(std::equal(apart.input.begin(), apart.input.end(), apart.block), "the input changed");
        }
      }
    });
  }
}

TEST(shm_what_everyone_sums_is_complete_when_all_have_read_it) {
  Host host(2);
  const auto first = host.engine(0), second = host.engine(1);
  Apart mine(host, 0, {.numel = kLarge}), theirs(host, 1, {.numel = kLarge});
  const auto seq = first->start(mine.operation);
  second->start(theirs.operation);  // sums at once, because all data is there
  CHECK(theirs.output == theirs.expected);
  CHECK(!second->poll(seq));
  CHECK(first->poll(seq));
  CHECK(second->poll(seq));
}

TEST(shm_a_question_is_answered_with_what_all_accept) {
  Host host(3);
  check_ranks(3, [&](int rank) {
    const auto engine = host.engine(rank);
    for (const int dissenter : {-1, 0, 2}) {
      bool all = dissenter >= 0;
      const Operation question{.numel = kLarge, .output = &all, .form = Form::kQuestion, .accepts = rank != dissenter};
      engine->wait(engine->start(question), kPatience);
      require(all == (dissenter < 0), "a wrong answer");
    }
    engine->wait(engine->start({.numel = kLarge, .form = Form::kQuestion}), kPatience);  // a rank that doesn't query
  });
}

TEST(shm_ranks_that_disagree_on_the_form_are_out_of_step) {
  for (const auto form : {Form::kQuestion, Form::kEveryone}) {
    Host host(2);
    const auto first = host.engine(0), second = host.engine(1);
    Apart mine(host, 0, {.numel = kLarge}), theirs(host, 1, {.numel = kLarge});
    mine.operation.form = Form::kUsual;
    mine.operation.output = mine.block;
    theirs.operation.form = form;
    first->start(mine.operation);
    CHECK(has(error_of([&] { second->start(theirs.operation); }), {"out of step", "all_reduce of 200012 bytes"}));
  }
}

}  // namespace
}  // namespace torchddp::shm
