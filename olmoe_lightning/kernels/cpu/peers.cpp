// A barrier of processes of one host, on words of shared memory: each posts a few numbers under a sequence number and
// waits until all others have posted theirs. What a process wrote to shared memory before it posted is visible to every
// process that has seen the post (release and acquire). A wait spins for the time a cache line takes, then sleeps in the kernel.

#include <climits>
#include <ctime>

#include "common.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// A process' block of 64-bit words: the sequence number in a cache line of its own, then a double buffer for numbers. Two
// halves are enough: a process writes to a half again only after all have posted to the other, having read this one.
constexpr int64_t kNumbers = 8;
constexpr int64_t kFirst = 8;
constexpr int kSpins = 4000;

inline int64_t* numbers(int64_t* block, int32_t sequence) { return block + kFirst + (sequence & 1) * kNumbers; }

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Sleeps until the word has changed, a post wakes this process, or 20 ms are over.
inline void sleep_on(int32_t* word, int32_t seen) {
  timespec moment{0, 20 * 1000 * 1000};
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &moment, nullptr, 0);
#else
  moment.tv_nsec = 50 * 1000;
  nanosleep(&moment, nullptr);
#endif
}

inline void wake(int32_t* word) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

extern "C" {

// Posts `mine` (at most 8 numbers) under this sequence number.
void peers_post(int64_t** blocks, int64_t rank, int32_t sequence, const int64_t* mine, int64_t count) {
  int64_t* block = blocks[rank];
  std::copy_n(mine, count, numbers(block, sequence));
  auto* word = reinterpret_cast<int32_t*>(block);
  __atomic_store_n(word, sequence, __ATOMIC_SEQ_CST);
  wake(word);
}

// The numbers of all [size, count] under this sequence number. Returns -1, or the rank of a process that has not posted in time.
int64_t peers_read(int64_t** blocks, int64_t size, int32_t sequence, int64_t count, double seconds, int64_t* all) {
  const double end = now() + seconds;
  for (int64_t peer = 0; peer < size; ++peer) {
    auto* word = reinterpret_cast<int32_t*>(blocks[peer]);
    // The difference, not the order: the numbers wrap around.
    for (int spin = 0; ; ++spin) {
      const int32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
      if (static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(sequence)) >= 0) break;
      if (spin < kSpins) {
        relax();
        continue;
      }
      if (now() > end) return peer;
      sleep_on(word, seen);
    }
    std::copy_n(numbers(blocks[peer], sequence), count, all + peer * count);
  }
  return -1;
}

}  // extern "C"
