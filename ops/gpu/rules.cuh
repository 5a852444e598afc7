// Rules by which a weight follows its gradient, as TensorFlow's optimizers have them; rules.py says
// which options they have. rule(w, g, slots) changes the slots and returns the new weight.

struct SGD {
  static constexpr int kSlots = 0;
  float rate;
  __device__ __forceinline__ explicit SGD(const float* options) : rate(options[0]) {}
  __device__ __forceinline__ float operator()(float w, float g, float*) const {
    return w - rate * g;
  }
};

struct Momentum {
  static constexpr int kSlots = 1;
  float rate, momentum;
  bool nesterov;
  __device__ __forceinline__ explicit Momentum(const float* options)
      : rate(options[0]), momentum(options[1]), nesterov(options[2] != 0) {}
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    slots[0] = slots[0] * momentum + g;
    return nesterov ? w - (g * rate + slots[0] * momentum * rate) : w - rate * slots[0];
  }
};

struct Adagrad {
  static constexpr int kSlots = 1;
  float rate, epsilon, within;  // the root
  __device__ __forceinline__ explicit Adagrad(const float* options)
      : rate(options[0]), epsilon(options[1]), within(options[2]) {}
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    slots[0] += g * g;
    return w - rate * g / (sqrtf(slots[0] + within) + epsilon);
  }
};

// One number a row: `squares` is the sum of its gradient's squares.
struct RowWiseAdagrad {
  static constexpr int kSlots = 0;  // of an element
  float rate, epsilon;
  __device__ __forceinline__ explicit RowWiseAdagrad(const float* options)
      : rate(options[0]), epsilon(options[1]) {}
  __device__ __forceinline__ float accumulated(float sum, float squares, i64 dim) const {
    return sum + squares / static_cast<float>(dim);
  }
  __device__ __forceinline__ float operator()(float w, float g, float sum) const {
    return w - rate * g / (sqrtf(sum) + epsilon);
  }
};

struct Adam {
  static constexpr int kSlots = 2;
  float rate, beta1, beta2, epsilon, rest1, rest2;
  __device__ __forceinline__ explicit Adam(const float* options)
      : rate(options[0]),
        beta1(options[1]),
        beta2(options[2]),
        epsilon(options[3]),
        rest1(options[4]),
        rest2(options[5]) {}
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    slots[0] = slots[0] * beta1 + g * rest1;
    slots[1] = slots[1] * beta2 + g * g * rest2;
    return w - rate * slots[0] / (sqrtf(slots[1]) + epsilon);
  }
};

struct Ftrl {
  static constexpr int kSlots = 2;
  float rate, l1, l2, shrinkage, power;
  __device__ __forceinline__ explicit Ftrl(const float* options)
      : rate(options[0]),
        l1(options[1]),
        l2(options[2]),
        shrinkage(options[3]),
        power(options[4]) {}
  __device__ __forceinline__ float root(float sum) const {
    return power == -.5f ? sqrtf(sum) : powf(sum, -power);
  }
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    const float sum = slots[0] + g * g, after = root(sum);
    // Without shrinkage an infinite weight is multiplied by nothing.
    const float pulled = shrinkage > 0 ? g + 2 * shrinkage * w : g,
                linear = slots[1] + pulled - (after - root(slots[0])) / rate * w;
    slots[0] = sum;
    slots[1] = linear;
    const float nearest = linear > l1 ? l1 : linear < -l1 ? -l1 : linear;
    return (nearest - linear) / (after / rate + 2 * l2);
  }
};

struct RMSProp {
  static constexpr int kSlots = 2;
  float rate, decay, rest, momentum, epsilon;
  __device__ __forceinline__ explicit RMSProp(const float* options)
      : rate(options[0]),
        decay(options[1]),
        rest(options[2]),
        momentum(options[3]),
        epsilon(options[4]) {}
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    slots[0] = slots[0] * decay + g * g * rest;
    slots[1] = slots[1] * momentum + rate * g / sqrtf(slots[0] + epsilon);
    return w - slots[1];
  }
};

struct CenteredRMSProp {
  static constexpr int kSlots = 3;
  float rate, decay, rest, momentum, epsilon;
  __device__ __forceinline__ explicit CenteredRMSProp(const float* options)
      : rate(options[0]),
        decay(options[1]),
        rest(options[2]),
        momentum(options[3]),
        epsilon(options[4]) {}
  __device__ __forceinline__ float operator()(float w, float g, float* slots) const {
    slots[0] = slots[0] * decay + g * g * rest;
    slots[2] = slots[2] * decay + g * rest;
    slots[1] = slots[1] * momentum + rate * g / sqrtf(slots[0] + epsilon - slots[2] * slots[2]);
    return w - slots[1];
  }
};

// The rules that update each element by itself, with the names of their kernels.
#define FOR_EACH_RULE(UPDATE) \
  UPDATE(sgd, SGD)            \
  UPDATE(momentum, Momentum)  \
  UPDATE(adagrad, Adagrad)    \
  UPDATE(adam, Adam)          \
  UPDATE(ftrl, Ftrl)          \
  UPDATE(rmsprop, RMSProp)    \
  UPDATE(centered_rmsprop, CenteredRMSProp)
