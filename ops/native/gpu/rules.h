// Says which kernel of update.cu has a rule, and which options it takes: rules.cuh reads them.
// Rules that a CPU has, too (../update_rules.h), have the same inputs there.

#ifndef COLLECTIVE_NATIVE_GPU_RULES_H_
#define COLLECTIVE_NATIVE_GPU_RULES_H_

#include <vector>

#include "../updated_tables.h"
#include "driver.h"

namespace collective {
namespace gpu {

struct Rule : RuleInputs {
  Kernel kernel, long_kernel;
  // Makes options of the numbers that an operation is given.
  std::vector<float> (*options)(const float* numbers);
};

inline std::vector<float> OptionsOfAdam(const float* n) {
  return {n[0], n[1], n[2], n[3], 1 - n[1], 1 - n[2]};
}

inline std::vector<float> OptionsOfKerasAdam(const float* n) {
  return {n[0], 1 - n[1], 1 - n[2], n[3], n[1], n[2]};
}

inline std::vector<float> OptionsOfRMSProp(const float* n) {
  return {n[0], n[1], 1 - n[1], n[2], n[3]};
}

using Options = std::vector<float>;

// The rules: name, slots, numbers, row-wise or not, all rows or not, kernel, options.
#define KERNEL(name) Kernel::kUpdate##name, Kernel::kUpdate##name##Long
inline const Rule kRules[] = {
    {{"SGD", 0, 1, false, false}, KERNEL(SGD), [](const float* n) { return Options{n[0]}; }},
    {{"Momentum", 1, 2, false, false},
     KERNEL(Momentum),
     [](const float* n) { return Options{n[0], n[1], 0}; }},
    {{"NesterovMomentum", 1, 2, false, false},
     KERNEL(Momentum),
     [](const float* n) { return Options{n[0], n[1], 1}; }},
    {{"Adagrad", 1, 1, false, false},
     KERNEL(Adagrad),
     [](const float* n) { return Options{n[0], 0, 0}; }},
    {{"KerasAdagrad", 1, 2, false, false},
     KERNEL(Adagrad),
     [](const float* n) { return Options{n[0], 0, n[1]}; }},
    {{"RowWiseAdagrad", 1, 2, true, false},
     KERNEL(RowWiseAdagrad),
     [](const float* n) { return Options{n[0], n[1]}; }},
    {{"LazyAdam", 2, 4, false, false}, KERNEL(Adam), OptionsOfAdam},
    {{"Adam", 2, 4, false, true}, KERNEL(Adam), OptionsOfAdam},
    {{"KerasAdam", 2, 4, false, true}, KERNEL(Adam), OptionsOfKerasAdam},
    {{"Ftrl", 2, 5, false, false}, KERNEL(Ftrl), [](const float* n) { return Options(n, n + 5); }},
    {{"RMSProp", 2, 4, false, false}, KERNEL(RMSProp), OptionsOfRMSProp},
    {{"CenteredRMSProp", 3, 4, false, false}, KERNEL(CenteredRMSProp), OptionsOfRMSProp},
};
#undef KERNEL

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_RULES_H_
