// The random generator of a simulated device: a seed, and how often it was drawn from.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace simulated {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device);
  // A seed for one kernel, another one each time.
  uint64_t draw();

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;

  uint64_t seed_;
  uint64_t offset_ = 0;
};

at::Generator default_generator(int64_t device);

} // namespace simulated
