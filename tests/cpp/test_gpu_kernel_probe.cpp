// Devices without kernels are detected once and reported once.
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "gpu/kernel_probe.h"

namespace torchddp::gpu {
namespace {

TEST(gpu_each_device_is_probed_once_and_told_of_once) {
  KernelProbe probe;
  std::vector<std::string> log;
  const auto runs_on = [&](int device) {
    return probe.runs_on(
        device,
        [&] {
          log.push_back("probe " + std::to_string(device));
          return device == 1 ? 209 : 0;
        },
        [&](int error) { log.push_back("warn " + std::to_string(error)); });
  };
  for (int i = 0; i < 3; ++i) {
    CHECK(runs_on(0));
    CHECK(!runs_on(1));
    CHECK(runs_on(2));
  }
  CHECK(log == (std::vector<std::string>{"probe 0", "probe 1", "warn 209", "probe 2"}));
}

TEST(gpu_a_probe_that_throws_is_made_again) {
  KernelProbe probe;
  int probes = 0;
  const auto runs = [&] {
    return probe.runs_on(
        0,
        [&]() -> int {
          if (++probes == 1) throw std::runtime_error("an error of somebody else");
          return 0;
        },
        [](int) {});
  };
  CHECK_THROWS(std::runtime_error, runs(), "somebody else");
  CHECK(runs());
  CHECK(runs());
  CHECK_EQ(probes, 2);
}

}  // namespace
}  // namespace torchddp::gpu
