// The threads of torch's pool: what they are worth, what each keeps, and items of work that they
// take in their order.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/stat.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

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
  // Waking a thread costs more than it saves (some 10 microseconds) where it does less than this.
  constexpr int64_t kWorthThread = 1 << 18;
  const int64_t wanted = std::min(items, multiplications / kWorthThread);
  if (wanted <= 1 || pool_was_lost) return 1;
  uint32_t threads = 1;
  pool.get_num_threads(&threads);
  return std::min<int64_t>(threads, wanted);
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
    pool.parallel_for(
        0, workers, 1, [](int64_t, int64_t, void* self) { static_cast<Work*>(self)->take_items(); },
        &work);
  return !work.out_of_memory.load(std::memory_order_relaxed);
}

}  // namespace

JITFMHA_EXPORT void jitfmha_use_pool(decltype(Pool::parallel_for) parallel_for,
                                     decltype(Pool::get_num_threads) get_num_threads) {
  pool = {parallel_for, get_num_threads};
}
