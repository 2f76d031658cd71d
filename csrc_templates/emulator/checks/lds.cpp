// LDS, word by word: bounds, content that nobody wrote, and accesses of two waves that no barrier
// orders.
//
// An operation is ordered before what other waves do after a barrier if an s_waitcnt had covered it
// when its wave arrived there: s_barrier itself waits for nothing.
#include "checks/check.h"

#if JITFMHA_EMULATOR_CHECK

#include <algorithm>

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
  bool is_write() const { return kind != Access::load; }
};

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
  const bool is_own = word.writer == access.wave.index;
  const bool both_atomic = word.written_atomically && access.kind == Access::atomic;
  if (is_own && word.written_order == Order::vector_memory && access.order != word.written_order &&
      !access.wave.observation->counters.is_complete(word.written_order, word.written_serial)) {
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

void note_writer(const LdsAccess& access, LdsWord& word, u8 bytes) {
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
  word.initialized_bytes |= bytes;
}

inline void check_word(const LdsAccess& access, LdsWord& word, u32 offset, u8 bytes) {
  if (access.kind != Access::store && (bytes & ~word.initialized_bytes))
    report(access.wave, access.inst, FindingKind::uninitialized, access.lane,
           [&] { return formatted("reads LDS at 0x%x, which nobody wrote", offset); });
  if (word.written_bytes & bytes) check_against_writer(access, word, offset);
  if (access.is_write()) {
    if (word.reader[0] != LdsWord::kNobody) check_against_readers(access, word, offset);
    note_writer(access, word, bytes);
  } else {
    note_reader(access, word);
  }
}

}  // namespace

void check_lds(Wave& wave, const Instruction& inst, int lane, u64 offset, u32 bytes, Access kind) {
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
  const LdsAccess access{wave, inst, lane, kind, order, serial, dword_of(wave, inst)};
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

#endif
