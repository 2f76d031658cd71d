// The instruction tables for a library that decodes and does no more: each row without what
// executes it, so that no semantics are compiled. The emulator has the rows of instructions/.
#include "decode/instruction.h"
#include "memory/atomics.h"

#define EMULATOR_DECODES_ONLY
#undef EMULATOR_EXECUTOR
#define EMULATOR_EXECUTOR(...) nullptr

namespace emulator {
namespace {

namespace vop1 {
#define VECTOR_TABLE "instructions/vop1.inc"
#define VECTOR_FORMAT VOP1
#include "instructions/vector_table.h"
}  // namespace vop1

namespace vop2 {
#define VECTOR_TABLE "instructions/vop2.inc"
#define VECTOR_FORMAT VOP2
#include "instructions/vector_table.h"
}  // namespace vop2

namespace vopc {
#define VECTOR_TABLE "instructions/vopc.inc"
#define VECTOR_FORMAT VOPC
#include "instructions/vector_table.h"
}  // namespace vopc

namespace vop3 {
#define VECTOR_TABLE "instructions/vop3.inc"
#define VECTOR_FORMAT VOP3
#include "instructions/vector_table.h"
}  // namespace vop3

namespace vop3_convert {
#define VECTOR_TABLE "instructions/vop3_convert.inc"
#define VECTOR_FORMAT VOP3
#include "instructions/vector_table.h"
}  // namespace vop3_convert

namespace vop3p {
#define VECTOR_TABLE "instructions/vop3p.inc"
#define VECTOR_FORMAT VOP3P
#define VECTOR_EXECUTOR
#define VECTOR_SIGNATURE(...) packed_signature(EMULATOR_SIGNATURE(__VA_ARGS__))
#include "instructions/vector_table.h"
}  // namespace vop3p

#define CUSTOM(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, UNIT, ...) \
  EMULATOR_ROW(FORMAT, OPCODE, ARCH, #NAME, nullptr, EMULATOR_SIGNATURE(RESULT, ARGS), UNIT)
#define SOP(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  CUSTOM(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, Unit::salu)
const Definition kSop[] = {
#include "instructions/sop.inc"
};
const Definition kSmem[] = {
#include "instructions/smem.inc"
};
const Definition kMfma[] = {
#include "instructions/mfma.inc"
};
const Definition kDs[] = {
#include "instructions/ds.inc"
};
const Definition kMubuf[] = {
#include "instructions/mubuf.inc"
};
const Definition kFlat[] = {
#include "instructions/flat.inc"
};

}  // namespace

DefinitionSpan sop_definitions() { return {kSop, std::size(kSop)}; }
DefinitionSpan smem_definitions() { return {kSmem, std::size(kSmem)}; }
DefinitionSpan vop1_definitions() { return {vop1::kDefinitions, std::size(vop1::kDefinitions)}; }
DefinitionSpan vop2_definitions() { return {vop2::kDefinitions, std::size(vop2::kDefinitions)}; }
DefinitionSpan vopc_definitions() { return {vopc::kDefinitions, std::size(vopc::kDefinitions)}; }
DefinitionSpan vop3_definitions() { return {vop3::kDefinitions, std::size(vop3::kDefinitions)}; }
DefinitionSpan vop3_convert_definitions() {
  return {vop3_convert::kDefinitions, std::size(vop3_convert::kDefinitions)};
}
DefinitionSpan vop3p_definitions() { return {vop3p::kDefinitions, std::size(vop3p::kDefinitions)}; }
DefinitionSpan mfma_definitions() { return {kMfma, std::size(kMfma)}; }
DefinitionSpan lds_definitions() { return {kDs, std::size(kDs)}; }
DefinitionSpan buffer_definitions() { return {kMubuf, std::size(kMubuf)}; }
DefinitionSpan flat_definitions() { return {kFlat, std::size(kFlat)}; }

}  // namespace emulator
