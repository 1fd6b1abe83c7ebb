#pragma once

namespace torchddp::bindings {

// What this was built for, as lines `name=value`; a part that does not apply is empty. torchddp/_import_check.py also searches
// the file for it when it does not load.
extern const char* const kBuildInfo;
extern const char* const kVersion;
extern const bool kWithCuda;

}  // namespace torchddp::bindings
