// VOPC. The table is vopc.inc.
#include "execution/lanes.h"
#include "numbers/float_order.h"

namespace emulator {
namespace {

// v_cmpx: the mask goes to its destination and to EXEC.
template <auto kApply>
struct CompareAndSetExec {
  static void execute(Wave& wave, const Instruction& inst) {
    Elementwise<kApply>::execute(wave, inst);
    write_scalar_pair(wave, kExecIndex, wave.pair(inst.scalar_destination.index));
  }
};

template <class T, class Bits> bool is_of_class(Bits value, u32 classes) {
  return classes >> float_class_bit(bit_cast<T>(value)) & 1;
}

#define VECTOR_TABLE "instructions/vopc.inc"
#define VECTOR_FORMAT VOPC
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vopc_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
