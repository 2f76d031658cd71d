// LDS, word by word: bounds, content that nobody wrote, and accesses of two waves that no barrier
// orders.
//
// An operation is ordered before what other waves do after a barrier if an s_waitcnt had covered it
// when its wave arrived there: s_barrier itself waits for nothing.
#include <algorithm>
#include <cstring>

#include "checks/check.h"

// What runs for each word of each lane's access.
#define EMULATOR_FOR_EACH_WORD inline __attribute__((always_inline))

namespace emulator {

bool LdsAccess::loads_to_lds() const { return wave.observation->current->loads_to_lds; }

u64 LdsAccess::source(u32 offset) const {
  const u64 from = loads_to_lds() ? wave.observation->loaded_from[lane] : 0;
  return from ? from + (offset - begin) : 0;
}

namespace {

using WritesOfWord = std::array<u32, kMostWaves>;

// Two waves may load the same bytes to one word: it does not matter which load comes first.
bool loads_the_same(const LdsAccess& access, const LdsWord& word, u32 offset) {
  if (word.writer == LdsWord::kNobody || !access.loads_to_lds()) return false;
  const auto& instructions = access.wave.dispatch().code->instructions;
  return instructions[word.written_at].definition == access.inst.definition &&
         instructions[word.written_at].to_lds && word.loaded_from == access.source(offset);
}

// The writes of the word, if one of them has been published to all waves or is the reader's own.
const WritesOfWord* writes_that_are_known(const LdsAccess& access, const LdsWord& word,
                                          u32 offset) {
  if (!word.written_by_several || access.is_write()) return nullptr;
  const WorkgroupObservation& workgroup = *access.wave.workgroup->observation;
  const WritesOfWord& writes = workgroup.writes_of_word.at(offset / 4);
  if (writes[access.wave.index]) return &writes;
  for (u32 wave = 0; wave < workgroup.published.size(); ++wave) {
    const u32 published = workgroup.published[wave][static_cast<u32>(word.written_order)];
    if (writes[wave] && writes[wave] <= published) return &writes;
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

u32 content_of(const Workgroup& workgroup, u32 offset) {
  u32 word = 0;
  const u32 begin = offset & ~3u;
  std::memcpy(&word, workgroup.lds + begin, std::min(4u, workgroup.lds_bytes - begin));
  return word;
}

// Whether a plain store meets no other waves but those that have stored to the same bytes.
__attribute__((noinline)) bool is_contested(const LdsAccess& access, const LdsWord& word,
                                            u32 offset, u8 bytes) {
  if (access.kind != Access::store || access.loads_to_lds() || word.written_atomically ||
      word.loaded_from || (bytes & ~word.written_bytes))
    return false;
  const WorkgroupObservation& workgroup = *access.wave.workgroup->observation;
  for (u32 slot = 0; slot < 2; ++slot) {
    const u8 reader = word.reader[slot];
    const bool has_stored = reader == access.wave.index || reader == word.writer ||
                            (word.written_by_several && reader != LdsWord::kNobody &&
                             workgroup.writes_of_word.at(offset / 4)[reader]);
    if (reader != LdsWord::kNobody && !has_stored &&
        !is_ordered(workgroup, reader, word.read_order[slot], word.read_serial[slot]))
      return false;
  }
  return true;
}

void report_race_with_writer(const LdsAccess& access, const LdsWord& word, u32 offset) {
  const Workgroup& workgroup = *access.wave.workgroup;
  report(access.wave, access.inst, FindingKind::lds_race, access.lane, [&] {
    return formatted("%s LDS at 0x%x, which wave %u wrote by %s, %s", verb(access.kind), offset,
                     word.writer, instruction_at(access.wave, word.written_at).c_str(),
                     reason(workgroup, word.writer, word.written_order, word.written_serial));
  });
}

__attribute__((noinline)) bool put_off(const LdsAccess& access, u32 offset, u8 bytes) {
  WaveObservation& observation = *access.wave.observation;
  const u32 before = content_of(*access.wave.workgroup, offset);
  observation.contested_stores.push_back({access, offset, bytes, before});
  observation.is_unfinished = true;
  return false;
}

// False where only the access can tell whether there is a race: it is put off.
bool check_against_writer(const LdsAccess& access, const LdsWord& word, u32 offset, u8 bytes) {
  const Workgroup& workgroup = *access.wave.workgroup;
  const WritesOfWord* const writes = writes_that_are_known(access, word, offset);
  const u32 own_write = writes ? (*writes)[access.wave.index] : 0;
  if (writes && !own_write) return true;
  const bool is_own = own_write || word.writer == access.wave.index;
  const u32 own_serial = own_write ? own_write : word.written_serial;
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
    if (is_contested(access, word, offset, bytes)) return put_off(access, offset, bytes);
    report_race_with_writer(access, word, offset);
  }
  return true;
}

EMULATOR_FOR_EACH_WORD void check_against_readers(const LdsAccess& access, const LdsWord& word,
                                                  u32 offset) {
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

// The word has the bytes already that the wave writes.
void note_same_write(const LdsAccess& access, LdsWord& word, u32 offset) {
  WritesOfWord& writes = access.wave.workgroup->observation->writes_of_word[offset / 4];
  if (!word.written_by_several) writes = {};
  word.written_by_several = true;
  writes[word.writer] = word.written_serial;
  writes[access.wave.index] = access.serial;
  word.writer = access.wave.index;
  word.written_serial = access.serial;
  word.written_at = access.at;
}

EMULATOR_FOR_EACH_WORD void note_writer(const LdsAccess& access, LdsWord& word, u32 offset,
                                        u8 bytes) {
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
  word.written_by_several = false;
  word.loaded_from = access.source(offset);
  word.initialized_bytes |= bytes;
}

inline void check_word(const LdsAccess& access, LdsWord& word, u32 offset, u8 bytes) {
  if (access.kind != Access::store && (bytes & ~word.initialized_bytes))
    report(access.wave, access.inst, FindingKind::uninitialized, access.lane,
           [&] { return formatted("reads LDS at 0x%x, which nobody wrote", offset); });
  if (word.writer != access.wave.index && loads_the_same(access, word, offset)) {
    note_same_write(access, word, offset);
    return;
  }
  if (word.written_bytes & bytes && !check_against_writer(access, word, offset, bytes)) return;
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
  if (__builtin_expect(wave.observation->is_unfinished, 0) ||
      __builtin_expect(!wave.workgroup->observation->undefined_lds.empty(), 0))
    move_undefined_lds(wave, lane, static_cast<u32>(offset), bytes, kind);
}

// Waves may store the same bytes to one place.
void settle_contested_stores(Wave& wave) {
  for (const ContestedStore& each : wave.observation->contested_stores) {
    LdsWord& word = wave.workgroup->observation->lds[each.offset / 4];
    const u32 changed = each.before ^ content_of(*wave.workgroup, each.offset);
    bool is_same = true;
    for (u32 byte = 0; byte < 4; ++byte)
      is_same &= !(each.bytes >> byte & 1) || !(changed >> (8 * byte) & 0xff);
    if (!is_same) {
      if (word.writer != wave.index) report_race_with_writer(each.access, word, each.offset);
      check_against_readers(each.access, word, each.offset);
      note_writer(each.access, word, each.offset, each.bytes);
    }
    // Who has written a part of what another wave did adds nothing to it.
    else if (word.writer != wave.index && word.written_bytes == each.bytes)
      note_same_write(each.access, word, each.offset);
  }
  wave.observation->contested_stores.clear();
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
