// The exported calls under names of C, for the tests in Python.
#include <jitfmha.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT std::size_t size_of_forward_arguments() { return sizeof(jitfmha::MhaFwdArgs); }
EXPORT std::size_t size_of_backward_arguments() { return sizeof(jitfmha::MhaBwdArgs); }
EXPORT void use_runtime(const char* path, jitfmha::Status* status) {
  *status = jitfmha::use_hip_runtime(path);
}
EXPORT void plan_forward(const jitfmha::MhaFwdArgs* args, jitfmha::MhaPlan* plan,
                         jitfmha::Status* status) {
  *status = jitfmha::plan_mha_fwd(*args, plan);
}
EXPORT void forward(const jitfmha::MhaFwdArgs* args, jitfmha::Status* status) {
  *status = jitfmha::mha_fwd(*args, nullptr);
}
EXPORT void forward_splitkv(const jitfmha::MhaFwdArgs* args, jitfmha::Status* status) {
  *status = jitfmha::mha_fwd_splitkv(*args, nullptr);
}
EXPORT void batch_prefill(const jitfmha::MhaFwdArgs* args, jitfmha::Status* status) {
  *status = jitfmha::mha_batch_prefill(*args, nullptr);
}
EXPORT std::size_t size_of_append_arguments() {
  return sizeof(jitfmha::MhaFwdAppendkvTraits) + sizeof(jitfmha::MhaFwdAppendkvArgs);
}
EXPORT void append(const jitfmha::MhaFwdAppendkvTraits* traits,
                   const jitfmha::MhaFwdAppendkvArgs* args, jitfmha::Status* status) {
  *status = jitfmha::mha_fwd_appendkv(*traits, *args, nullptr);
}
EXPORT void plan_backward(const jitfmha::MhaBwdArgs* args, jitfmha::MhaPlan* plan,
                          jitfmha::Status* status) {
  *status = jitfmha::plan_mha_bwd(*args, plan);
}
EXPORT void backward(const jitfmha::MhaBwdArgs* args, jitfmha::Status* status) {
  *status = jitfmha::mha_bwd(*args, nullptr);
}
