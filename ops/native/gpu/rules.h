// Says which kernel of update.cu has a rule, and which options it takes: rules.cuh reads them.

#ifndef COLLECTIVE_NATIVE_GPU_RULES_H_
#define COLLECTIVE_NATIVE_GPU_RULES_H_

#include <cstring>
#include <vector>

#include "driver.h"

namespace collective {
namespace gpu {

struct Rule {
  const char* name;  // as it ends the names of the operations for one table
  Kernel kernel, long_kernel;
  int slots, numbers;
  // Makes options of the numbers that an operation is given.
  std::vector<float> (*options)(const float* numbers);
  bool row_wise = false;  // A slot has one number a row.
  bool all_rows = false;  // Rows without a gradient change, too.
};

inline std::vector<float> OptionsOfAdam(const float* n) {
  return {n[0], n[1], n[2], n[3], 1 - n[1], 1 - n[2]};
}

inline std::vector<float> OptionsOfRMSProp(const float* n) {
  return {n[0], n[1], 1 - n[1], n[2], n[3]};
}

using Options = std::vector<float>;

inline const Rule kRules[] = {
    {"SGD", Kernel::kUpdateSGD, Kernel::kUpdateSGDLong, 0, 1,
     [](const float* n) { return Options{n[0]}; }},
    {"Momentum", Kernel::kUpdateMomentum, Kernel::kUpdateMomentumLong, 1, 2,
     [](const float* n) { return Options{n[0], n[1], 0}; }},
    {"NesterovMomentum", Kernel::kUpdateMomentum, Kernel::kUpdateMomentumLong, 1, 2,
     [](const float* n) { return Options{n[0], n[1], 1}; }},
    {"Adagrad", Kernel::kUpdateAdagrad, Kernel::kUpdateAdagradLong, 1, 1,
     [](const float* n) { return Options{n[0], 0}; }},
    {"RowWiseAdagrad", Kernel::kUpdateRowWiseAdagrad, Kernel::kUpdateRowWiseAdagradLong, 1, 2,
     [](const float* n) { return Options{n[0], n[1]}; }, true},
    {"LazyAdam", Kernel::kUpdateAdam, Kernel::kUpdateAdamLong, 2, 4, OptionsOfAdam},
    {"Adam", Kernel::kUpdateAdam, Kernel::kUpdateAdamLong, 2, 4, OptionsOfAdam, false, true},
    {"Ftrl", Kernel::kUpdateFtrl, Kernel::kUpdateFtrlLong, 2, 5,
     [](const float* n) { return Options(n, n + 5); }},
    {"RMSProp", Kernel::kUpdateRMSProp, Kernel::kUpdateRMSPropLong, 2, 4, OptionsOfRMSProp},
    {"CenteredRMSProp", Kernel::kUpdateCenteredRMSProp, Kernel::kUpdateCenteredRMSPropLong, 3, 4,
     OptionsOfRMSProp},
};

// Returns the rule of this name; null if there is none.
inline const Rule* FindRule(const char* name) {
  for (const Rule& rule : kRules) {
    if (std::strcmp(rule.name, name) == 0) return &rule;
  }
  return nullptr;
}

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_RULES_H_
