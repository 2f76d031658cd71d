// LDS, word by word: bounds, content that nobody wrote, and accesses of two waves that no barrier
// orders.
//
// An operation is ordered before what other waves do after a barrier if an s_waitcnt had covered it
// when its wave arrived there: s_barrier itself waits for nothing.
#include <algorithm>

#include "checks/check.h"

namespace emulator {
namespace {

// The access that is checked.
struct LdsAccess {
  Wave& wave;
  const Instruction& inst;
  int lane;
  Access kind;
  Order order;
  u32 serial, at;  // at: dword of the code
  u64 begin;       // its first byte in LDS
  bool is_write() const { return kind != Access::load; }
  bool loads_to_lds() const { return wave.observation->current->loads_to_lds; }
  // Where a load into LDS has the word at `offset` from.
  u64 source(u32 offset) const {
    const u64 from = loads_to_lds() ? wave.observation->loaded_from[lane] : 0;
    return from ? from + (offset - begin) : 0;
  }
};

using LoadsOfWord = std::array<u32, kMostWaves>;

// Two waves may load the same bytes to one word: it does not matter which load comes first.
bool loads_the_same(const LdsAccess& access, const LdsWord& word, u32 offset) {
  if (word.writer == LdsWord::kNobody || !access.loads_to_lds()) return false;
  const auto& instructions = access.wave.dispatch().code->instructions;
  return instructions[word.written_at].definition == access.inst.definition &&
         instructions[word.written_at].to_lds && word.loaded_from == access.source(offset);
}

// The loads of the word, if one of them has been published to all waves or is the reader's own.
const LoadsOfWord* loads_that_are_known(const LdsAccess& access, const LdsWord& word, u32 offset) {
  if (!word.loaded_by_several || access.is_write()) return nullptr;
  const WorkgroupObservation& workgroup = *access.wave.workgroup->observation;
  const LoadsOfWord& loads = workgroup.loads_of_word.at(offset / 4);
  if (loads[access.wave.index]) return &loads;
  for (u32 wave = 0; wave < workgroup.published.size(); ++wave) {
    const u32 published = workgroup.published[wave][static_cast<u32>(Order::vector_memory)];
    if (loads[wave] && loads[wave] <= published) return &loads;
  }
  return nullptr;
}

bool is_ordered(const WorkgroupObservation& workgroup, u8 wave, Order order, u32 serial) {
  return serial <= workgroup.published[wave][static_cast<u32>(order)];
}

const char* verb(Access access) {
  return access == Access::load ? "reads" : access == Access::store ? "writes" : "updates";
}

// What is missing between the two accesses.
const char* reason(const Workgroup& workgroup, u8 wave, Order order, u32 serial) {
  const CounterState& counters = workgroup.observation->waves[wave]->observation->counters;
  return counters.is_complete(order, serial)
             ? "without a barrier between"
             : "without a barrier between that comes after the s_waitcnt for it";
}

void check_against_writer(const LdsAccess& access, const LdsWord& word, u32 offset) {
  const Workgroup& workgroup = *access.wave.workgroup;
  const LoadsOfWord* const loads = loads_that_are_known(access, word, offset);
  const u32 own_load = loads ? (*loads)[access.wave.index] : 0;
  if (loads && !own_load) return;
  const bool is_own = own_load || word.writer == access.wave.index;
  const u32 own_serial = own_load ? own_load : word.written_serial;
  const bool both_atomic = word.written_atomically && access.kind == Access::atomic;
  if (is_own && word.written_order == Order::vector_memory && access.order != word.written_order &&
      !access.wave.observation->counters.is_complete(word.written_order, own_serial)) {
    report(access.wave, access.inst, FindingKind::wait_count, access.lane, [&] {
      return formatted("%s LDS at 0x%x before an s_waitcnt covers %s, which writes it",
                       verb(access.kind), offset,
                       instruction_at(access.wave, word.written_at).c_str());
    });
  }
  if (!is_own && !both_atomic &&
      !is_ordered(*workgroup.observation, word.writer, word.written_order, word.written_serial)) {
    report(access.wave, access.inst, FindingKind::lds_race, access.lane, [&] {
      return formatted("%s LDS at 0x%x, which wave %u wrote by %s, %s", verb(access.kind), offset,
                       word.writer, instruction_at(access.wave, word.written_at).c_str(),
                       reason(workgroup, word.writer, word.written_order, word.written_serial));
    });
  }
}

void check_against_readers(const LdsAccess& access, const LdsWord& word, u32 offset) {
  const Workgroup& workgroup = *access.wave.workgroup;
  for (u32 slot = 0; slot < 2; ++slot) {
    const u8 reader = word.reader[slot];
    const Order order = word.read_order[slot];
    const u32 serial = word.read_serial[slot];
    if (reader == LdsWord::kNobody || reader == access.wave.index) continue;
    if (is_ordered(*workgroup.observation, reader, order, serial)) continue;
    report(access.wave, access.inst, FindingKind::lds_race, access.lane, [&] {
      return formatted("%s LDS at 0x%x, which wave %u read, %s", verb(access.kind), offset, reader,
                       reason(workgroup, reader, order, serial));
    });
  }
}

// Two readers are remembered; one whose reading a barrier has ordered makes room for another.
void note_reader(const LdsAccess& access, LdsWord& word) {
  const u8 self = access.wave.index;
  u32 slot = 0;
  if (word.reader[0] != self && word.reader[0] != LdsWord::kNobody) {
    const WorkgroupObservation& workgroup = *access.wave.workgroup->observation;
    const bool has_room = word.reader[1] == self || word.reader[1] == LdsWord::kNobody;
    slot =
        has_room || !is_ordered(workgroup, word.reader[0], word.read_order[0], word.read_serial[0]);
  }
  word.reader[slot] = self;
  word.read_serial[slot] = access.serial;
  word.read_order[slot] = access.order;
}

// The word has the bytes already that the wave loads.
void note_same_load(const LdsAccess& access, LdsWord& word, u32 offset) {
  LoadsOfWord& loads = access.wave.workgroup->observation->loads_of_word[offset / 4];
  if (!word.loaded_by_several) loads = {};
  word.loaded_by_several = true;
  loads[word.writer] = word.written_serial;
  loads[access.wave.index] = access.serial;
  word.writer = access.wave.index;
  word.written_serial = access.serial;
  word.written_at = access.at;
}

void note_writer(const LdsAccess& access, LdsWord& word, u32 offset, u8 bytes) {
  const bool same_operation = word.writer == access.wave.index &&
                              word.written_order == access.order &&
                              word.written_serial == access.serial;
  word.reader[0] = word.reader[1] = LdsWord::kNobody;
  word.written_bytes = static_cast<u8>(same_operation ? word.written_bytes | bytes : bytes);
  word.writer = access.wave.index;
  word.written_serial = access.serial;
  word.written_order = access.order;
  word.written_at = access.at;
  word.written_atomically = access.kind == Access::atomic;
  word.loaded_by_several = false;
  word.loaded_from = access.source(offset);
  word.initialized_bytes |= bytes;
}

inline void check_word(const LdsAccess& access, LdsWord& word, u32 offset, u8 bytes) {
  if (access.kind != Access::store && (bytes & ~word.initialized_bytes))
    report(access.wave, access.inst, FindingKind::uninitialized, access.lane,
           [&] { return formatted("reads LDS at 0x%x, which nobody wrote", offset); });
  if (word.writer != access.wave.index && loads_the_same(access, word, offset)) {
    note_same_load(access, word, offset);
    return;
  }
  if (word.written_bytes & bytes) check_against_writer(access, word, offset);
  if (access.is_write()) {
    if (word.reader[0] != LdsWord::kNobody) check_against_readers(access, word, offset);
    note_writer(access, word, offset, bytes);
  } else {
    note_reader(access, word);
  }
}

}  // namespace

void hooks::lds_access(Wave& wave, const Instruction& inst, int lane, u64 offset, u32 bytes,
                       Access kind) {
  const u32 allocated = wave.dispatch().lds_bytes;  // what the kernel asked for, not rounded up
  if (offset > allocated || allocated - offset < bytes) {
    report(wave, inst, FindingKind::lds_bounds, lane, [&] {
      return formatted("%s %u bytes of LDS at 0x%llx; the workgroup has 0x%x bytes", verb(kind),
                       bytes, static_cast<unsigned long long>(offset), allocated);
    });
    return;
  }
  const InstructionTraits& traits = *wave.observation->current;
  const Order order = traits.order == Order::none ? Order::lds : traits.order;
  const u32 serial = wave.observation->counters.issued[static_cast<u32>(order)];
  const LdsAccess access{wave, inst, lane, kind, order, serial, dword_of(wave, inst), offset};
  LdsWord* const words = wave.workgroup->observation->lds.data();
  const u32 end = static_cast<u32>(offset) + bytes;
  for (u32 at = static_cast<u32>(offset); at < end;) {
    const u32 word_begin = at & ~3u, stop = std::min(end, word_begin + 4);
    const u8 mask = static_cast<u8>((1u << (stop - word_begin)) - (1u << (at - word_begin)));
    check_word(access, words[word_begin / 4], at, mask);
    at = stop;
  }
}

void publish_lds(Workgroup& workgroup) {
  WorkgroupObservation& observation = *workgroup.observation;
  for (std::size_t i = 0; i < observation.waves.size(); ++i) {
    const CounterState& counters = observation.waves[i]->observation->counters;
    std::copy(std::begin(counters.completed), std::end(counters.completed),
              observation.published[i].begin());
    // What a flat operation did to LDS is done when its LDS counter says so.
    observation.published[i][static_cast<u32>(Order::flat)] = counters.flat_lgkmcnt_done;
  }
}

}  // namespace emulator
