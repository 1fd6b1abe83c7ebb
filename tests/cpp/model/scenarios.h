// What is searched.
#pragma once

#include <vector>

#include "model/search.h"

namespace torchddp::model {

std::vector<Scenario> scenarios();

}  // namespace torchddp::model
