// Distribution over threads: items of work, taken in their order by whichever thread is free.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/stat.h>
#endif

#include <algorithm>
#include <atomic>
#include <new>

#include "problem.h"

// PyTorch's thread pool, declared in torch/csrc/stable/c/shim.h.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                      void (*func)(int64_t, int64_t, void*), void* ctx);
extern "C" int32_t torch_get_num_threads(uint32_t* num_threads);

namespace {

// Whether this process was forked from one that had threads. The threads of torch's pool are not in
// it, but the pool does not know that, and would wait for them for ever.
bool pool_was_lost = false;

#if defined(__unix__) || defined(__APPLE__)
bool will_lose_threads = false;

// Linux counts threads as links of a directory, beside the two that each has.
void before_fork() {
  struct stat threads;
  will_lose_threads = stat("/proc/self/task", &threads) != 0 || threads.st_nlink != 3;
}
void after_fork_in_child() { pool_was_lost = pool_was_lost || will_lose_threads; }

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(before_fork, nullptr, after_fork_in_child);
}
#endif

// Scratch of the calling thread, kept for its lifetime and zeroed, as some padding is computed with
// but never written. Null when memory is exhausted.
template <class Scratch>
Scratch* thread_scratch() {
  struct Holder {
    Scratch* scratch = nullptr;
    ~Holder() { delete scratch; }
  };
  static thread_local Holder holder;
  if (!holder.scratch) holder.scratch = new (std::nothrow) Scratch();
  return holder.scratch;
}

// Room for `count` values of T, kept by the calling thread for its next calls. Null when memory is
// exhausted.
template <class T>
T* thread_array(int64_t count) {
  struct Holder {
    T* values = nullptr;
    int64_t capacity = 0;
    ~Holder() { delete[] values; }
  };
  static thread_local Holder holder;
  if (count > holder.capacity) {
    delete[] holder.values;
    holder.values = new (std::nothrow) T[count];
    holder.capacity = holder.values ? count : 0;
  }
  return holder.values;
}

// How many threads are worth waking for `items` items of so many multiplications in all.
int64_t worker_count(int64_t items, int64_t multiplications) {
  // Below this waking the other threads costs more than they save (some 10 microseconds).
  constexpr int64_t kWorthThreads = 1 << 19;
  uint32_t threads = 1;
  if (multiplications >= kWorthThreads && items > 1 && !pool_was_lost)
    torch_get_num_threads(&threads);
  return std::min<int64_t>(threads, items);
}

// Calls run_item(item, scratch) for all items on `workers` threads, which take the next item each
// as they get free. False when there is not enough memory.
template <class Scratch, class RunItem>
bool run_items(int64_t items, int64_t workers, const RunItem& run_item) {
  struct Work {
    const int64_t items;
    const RunItem& run_item;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};

    void take_items() {
      Scratch* scratch = thread_scratch<Scratch>();
      if (!scratch) {
        out_of_memory.store(true, std::memory_order_relaxed);
        return;
      }
      for (;;) {
        const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
        if (item >= items) return;
        run_item(item, *scratch);
      }
    }
  };
  Work work{items, run_item};
  if (workers <= 1) work.take_items();
  else
    torch_parallel_for(
        0, workers, 1, [](int64_t, int64_t, void* self) { static_cast<Work*>(self)->take_items(); },
        &work);
  return !work.out_of_memory.load(std::memory_order_relaxed);
}

// All query tiles of a problem, numbered sequence by sequence and within one head by head, or some
// heads side by side, the last tile first: under a causal mask it is the heaviest. gm1 takes the
// sequences with the most keys first.
class QueryTiles {
 public:
  // A tile and its sequence: the `turn`-th of `turns` of its head, before which there are
  // `heads_before` heads.
  struct Tile {
    Sequence seq;
    int64_t kv_head, first_row;
    int rows;
    int64_t heads_before, turn, turns;
  };

  // With tiles of at most `most_rows` rows; smaller ones to have `wanted_tiles`, if only for the
  // sake of balance.
  QueryTiles(const Problem& problem, int most_rows, int64_t wanted_tiles)
      : problem_(problem), tile_rows_(most_rows), wanted_tiles_(wanted_tiles) {}

  // To be called once, before all else. False when there is not enough memory.
  bool plan() {
    const FmhaShape& s = problem_.shape;
    int64_t rows = 0;
    if (kMode == Mode::gm0) {
      rows = s.batch * s.heads_q * s.seqlen_q;
      multiplications_ = rows * s.seqlen_k * (kHdimQ + kHdimV);
    } else {
      for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t added = problem_.seqlen_q(b) * s.heads_q;
        rows += added;
        multiplications_ += added * problem_.seqlen_k(b) * (kHdimQ + kHdimV);
      }
    }
    if (rows == 0) return true;

    // Chosen by the shape alone, not by the number of threads.
    tile_rows_ =
        round_up(int(std::min<int64_t>(rows / wanted_tiles_, tile_rows_ - 1) + 1), kPanelLanes);
    if (kMode == Mode::gm0) {
      count_ = s.batch * tiles_of(0);
      return true;
    }

    members_ = thread_array<Member>(s.batch);
    if (!members_) return false;
    for (int64_t b = 0; b < s.batch; ++b)
      if (problem_.seqlen_q(b) > 0) members_[member_count_++] = {b, problem_.seqlen_k(b), 0};
    std::sort(members_, members_ + member_count_, [](const Member& a, const Member& b) {
      return a.seqlen_k != b.seqlen_k ? a.seqlen_k > b.seqlen_k : a.index < b.index;
    });
    for (int64_t i = 0; i < member_count_; ++i) {
      members_[i].first_tile = count_;
      count_ += tiles_of(members_[i].index);
    }
    return true;
  }

  int64_t count() const { return count_; }

  // Of one product of all queries with all keys, and one with all values.
  int64_t multiplications() const { return multiplications_; }

  Tile operator[](int64_t number) const {
    int64_t b, first_tile, members_before;
    if (kMode == Mode::gm0) {
      b = members_before = number / tiles_of(0);
      first_tile = b * tiles_of(0);
    } else {
      const Member* after = std::upper_bound(
          members_, members_ + member_count_, number,
          [](int64_t wanted, const Member& member) { return wanted < member.first_tile; });
      b = after[-1].index;
      first_tile = after[-1].first_tile;
      members_before = after - 1 - members_;
    }
    const Sequence seq = problem_.sequence(b);
    const int64_t turns = tiles_of_head(b);
    const int64_t heads_k = problem_.shape.heads_k;
    const int64_t first_head =
        (number - first_tile) / (heads_side_by_side_ * turns) * heads_side_by_side_;
    const int64_t heads = std::min(heads_side_by_side_, heads_k - first_head);
    const int64_t among_them = number - first_tile - first_head * turns;
    const int64_t kv_head = first_head + among_them % heads, turn = among_them / heads;
    const int64_t first_row = (turns - 1 - turn) * tile_rows_;
    const int64_t rows = seq.seqlen_q * problem_.group_size() - first_row;
    return {seq,
            kv_head,
            first_row,
            int(std::min<int64_t>(rows, tile_rows_)),
            members_before * heads_k + kv_head,
            turn,
            turns};
  }

  int tile_rows() const { return tile_rows_; }

  // From now on the tiles of so many heads of a sequence take turns.
  void put_heads_side_by_side(int64_t count) { heads_side_by_side_ = count; }

  // (sequence, kv head) pairs that have tiles.
  int64_t heads() const {
    return (kMode == Mode::gm0 ? problem_.shape.batch : member_count_) * problem_.shape.heads_k;
  }

 private:
  // A sequence with queries, and the number of its first tile.
  struct Member {
    int64_t index, seqlen_k, first_tile;
  };

  int64_t tiles_of_head(int64_t b) const {
    return (problem_.seqlen_q(b) * problem_.group_size() + tile_rows_ - 1) / tile_rows_;
  }
  int64_t tiles_of(int64_t b) const { return problem_.shape.heads_k * tiles_of_head(b); }

  const Problem& problem_;
  int tile_rows_;
  int64_t wanted_tiles_;
  int64_t heads_side_by_side_ = 1;
  int64_t count_ = 0;
  int64_t multiplications_ = 0;
  Member* members_ = nullptr;  // gm1: by descending seqlen_k
  int64_t member_count_ = 0;
};

}  // namespace
