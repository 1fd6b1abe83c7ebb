// Signals that ask a process to stop: noted once, then passed on.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "common/stop_signals.h"

namespace torchddp {
namespace {

const std::vector<int> kBoth = {SIGTERM, SIGUSR1};
int handled = 0;

// How the body ends a child process: its exit code, or minus the signal.
template <typename Body>
int end_of(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(the_first_signal_is_noted_and_repetitions_are_ignored) {
  catch_stop_signals(kBoth);
  CHECK(noted_stop_signal() == 0);
  raise(SIGUSR1);
  raise(SIGTERM);  // within the same request
  CHECK(noted_stop_signal() == SIGUSR1);
  release_stop_signals(true);
}

TEST(a_later_signal_does_what_it_did_before) {
  CHECK(end_of([] {
          catch_stop_signals(kBoth);
          raise(SIGTERM);
          sleep(4);
          raise(SIGUSR1);
        }) == -SIGUSR1);
}

TEST(a_handler_that_was_there_is_called_later_and_restored) {
  std::signal(SIGUSR1, [](int) { ++handled; });
  catch_stop_signals(kBoth);
  raise(SIGUSR1);
  CHECK(handled == 0);
  pass_on_stop_signal(SIGUSR1);
  CHECK(handled == 1);
  release_stop_signals(true);
  raise(SIGUSR1);
  CHECK(handled == 2);
  std::signal(SIGUSR1, SIG_DFL);
}

TEST(a_handler_installed_since_stays) {
  catch_stop_signals(kBoth);
  std::signal(SIGUSR1, [](int) { handled = 100; });
  release_stop_signals(true);
  raise(SIGUSR1);
  CHECK(handled == 100);
  std::signal(SIGUSR1, SIG_DFL);
}

TEST(a_signal_that_was_not_heeded_stays_noted) {
  catch_stop_signals(kBoth);
  raise(SIGTERM);
  release_stop_signals(false);
  catch_stop_signals(kBoth);
  CHECK(noted_stop_signal() == SIGTERM);
  release_stop_signals(true);
  catch_stop_signals(kBoth);
  CHECK(noted_stop_signal() == 0);
  release_stop_signals(true);
}

TEST(a_forked_child_ends_at_the_first_signal_of_its_own_or_its_parent) {
  catch_stop_signals(kBoth);
  CHECK(end_of([] { raise(SIGTERM); }) == -SIGTERM);
  CHECK(end_of([] { end_of([] { kill(getppid(), SIGTERM); }); }) == 7);  // a process below it: ignored
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(7);
  }
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
  CHECK(noted_stop_signal() == 0);
  release_stop_signals(true);
}

TEST(a_forked_child_catches_signals_of_its_own) {
  catch_stop_signals(kBoth);
  CHECK(end_of([] {
          catch_stop_signals(kBoth);
          raise(SIGTERM);
          release_stop_signals(true);
          raise(SIGTERM);
        }) == -SIGTERM);
  release_stop_signals(true);
}

TEST(passing_a_signal_on_ends_the_process) {
  CHECK(end_of([] {
          catch_stop_signals(kBoth);
          raise(SIGTERM);
          pass_on_stop_signal(SIGTERM);
        }) == -SIGTERM);
}

TEST(wrong_numbers_and_a_second_catch_are_refused) {
  for (const int number : {0, -1, 65, SIGKILL}) {
    const std::vector<int> numbers = {SIGUSR1, number};
    CHECK_THROWS(std::invalid_argument, catch_stop_signals(numbers));
  }
  catch_stop_signals(kBoth);
  CHECK_THROWS(std::logic_error, catch_stop_signals(kBoth));
  release_stop_signals(true);
}

}  // namespace
}  // namespace torchddp
