// The threads of torch's pool: what they are worth, what each keeps, and items of work that they
// take in their order.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#endif

#include <cstdint>
#include <new>

#include "library.h"

#define JITFMHA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// PyTorch's thread pool: torch_parallel_for and torch_get_num_threads of
// torch/csrc/stable/c/shim.h. Python hands in their addresses, as linkers take a quarter of a
// second to read PyTorch.
struct Pool {
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size,
                          void (*func)(int64_t, int64_t, void*), void* ctx);
  int32_t (*get_num_threads)(uint32_t* num_threads);
};
Pool pool;

// Whether this process was forked from one that had threads. The threads of torch's pool are not in
// it, but the pool does not know that, and would wait for them for ever.
bool pool_was_lost = false;

#if (defined(__unix__) || defined(__APPLE__)) && !defined(JITFMHA_BESIDE)
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
inline int64_t worker_count(int64_t items, int64_t multiplications) {
  // Waking a thread costs more than it saves (some 10 microseconds) where it does less than this.
  constexpr int64_t kWorthThread = 1 << 18;
  const int64_t wanted = min(items, multiplications / kWorthThread);
  if (wanted <= 1 || pool_was_lost) return 1;
  uint32_t threads = 1;
  pool.get_num_threads(&threads);
  return min<int64_t>(threads, wanted);
}

// Tells the processor that the thread waits for others.
inline void pause_thread() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Items cut into shares of neighbours. A thread takes those of its share in their order, as it gets
// free, and then what is left in the shares behind it. A single share belongs to all threads.
class Turns {
 public:
  static constexpr int64_t kMostShares = 64;

  Turns(int64_t items, int64_t shares) : items_(items), shares_(shares) {
    for (int64_t i = 0; i < shares; ++i) next_[i].item.store(begin_of(i), kRelaxed);
  }

  // Calls visit(item) for items that nobody has taken, until there are none.
  template <class Visit>
  void take(int64_t worker, const Visit& visit) {
    int64_t visited = 0;
    for (int64_t i = 0; i < shares_; ++i) {
      const int64_t share = (worker + i) % shares_, end = begin_of(share + 1);
      Atomic<int64_t>& next = next_[share].item;
      while (next.load(kRelaxed) < end) {
        const int64_t item = next.fetch_add(1, kRelaxed);
        if (item >= end) break;
        visit(item);
        ++visited;
      }
    }
    visited_.fetch_add(visited, __ATOMIC_RELEASE);
  }

  bool all_are_visited() const { return visited_.load(__ATOMIC_ACQUIRE) == items_; }

  // Whether all have been visited, if not now then some microseconds later. It pauses before it
  // yields, which takes longer than most threads wait.
  bool wait() const {
    constexpr int kMostPauses = 1000, kMostYields = 100;
    for (int i = 0; !all_are_visited(); ++i) {
      if (i == kMostPauses + kMostYields) return false;
      if (i < kMostPauses) pause_thread();
#if defined(__unix__) || defined(__APPLE__)
      else sched_yield();
#endif
    }
    return true;
  }

 private:
  static constexpr int kRelaxed = __ATOMIC_RELAXED;
  // In a cache line of its own, which stays with the thread that has the share.
  struct alignas(64) Next {
    Atomic<int64_t> item;
  };

  int64_t begin_of(int64_t share) const { return items_ * share / shares_; }

  const int64_t items_, shares_;
  Next next_[kMostShares];
  alignas(64) Atomic<int64_t> visited_{0};
};

// Calls run_item(item, scratch) for all items on `workers` threads, and where there is something to
// finish, finish_item(item, scratch) for all of them once every one has been run. Items that take
// equally long are shared out: a thread then has the same ones in every call, and finds what it
// read before in its cache. To wake threads again takes longer than most of them wait for the last
// one; where it is late, as another process has its processor, they are woken. False when there is
// not enough memory.
template <class Scratch, class RunItem, class FinishItem>
bool run_items(int64_t items, int64_t workers, bool are_equal, const RunItem& run_item,
               bool has_finish, const FinishItem& finish_item) {
  struct Work {
    const RunItem& run_item;
    const bool has_finish;
    const FinishItem& finish_item;
    Turns to_run, to_finish;
    Atomic<bool> out_of_memory{false};

    void take_items(int64_t worker) {
      Scratch* scratch = thread_scratch<Scratch>();
      if (!scratch) {
        out_of_memory.store(true, __ATOMIC_RELAXED);
        return;
      }
      to_run.take(worker, [&](int64_t item) { run_item(item, *scratch); });
      if (has_finish && to_run.wait())
        to_finish.take(worker, [&](int64_t item) { finish_item(item, *scratch); });
    }
    void take_items_on(int64_t workers) {
      if (workers <= 1) return take_items(0);
      pool.parallel_for(
          0, workers, 1,
          [](int64_t worker, int64_t, void* self) { static_cast<Work*>(self)->take_items(worker); },
          this);
    }
  };
  const int64_t shares = are_equal ? min(max<int64_t>(workers, 1), Turns::kMostShares) : 1;
  Work work{run_item, has_finish, finish_item, {items, shares}, {items, shares}};
  work.take_items_on(workers);
  if (has_finish && !work.to_finish.all_are_visited()) work.take_items_on(workers);
  return !work.out_of_memory.load(__ATOMIC_RELAXED);
}
template <class Scratch, class RunItem>
bool run_items(int64_t items, int64_t workers, const RunItem& run_item) {
  return run_items<Scratch>(items, workers, false, run_item, false, [](int64_t, Scratch&) {});
}

}  // namespace

// A unit beside has only what threads of the other one call.
#if !defined(JITFMHA_BESIDE)
JITFMHA_EXPORT void jitfmha_use_pool(decltype(Pool::parallel_for) parallel_for,
                                     decltype(Pool::get_num_threads) get_num_threads) {
  pool = {parallel_for, get_num_threads};
}
#endif
