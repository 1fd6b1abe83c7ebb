// Sees every access of csrc/shm to ordinary memory: these sources are compiled with -fsanitize=thread, so the compiler calls the
// functions of this file. The sanitizer's own library is not linked.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "model/memory.h"

using torchddp::model::read;
using torchddp::model::write;

// NOLINTBEGIN: the names are given
#define ACCESS(size)                                               \
  void __tsan_read##size(void* at) { read(at, size); }             \
  void __tsan_write##size(void* at) { write(at, size); }           \
  void __tsan_unaligned_read##size(void* at) { read(at, size); }   \
  void __tsan_unaligned_write##size(void* at) { write(at, size); } \
  void __tsan_volatile_read##size(void* at) { read(at, size); }    \
  void __tsan_volatile_write##size(void* at) { write(at, size); }
// Of shared_ptr and the count of forks, which are none of the protocol's business.
#define ATOMIC(bits)                                                                                      \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* at, int) {                     \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                       \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* at, uint##bits##_t value, int) {              \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                       \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* at, uint##bits##_t more, int) { \
    return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST);                                                \
  }                                                                                                       \
  uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t* at, uint##bits##_t less, int) { \
    return __atomic_fetch_sub(at, less, __ATOMIC_SEQ_CST);                                                \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, size_t bytes) { read(at, bytes); }
void __tsan_write_range(void* at, size_t bytes) { write(at, bytes); }
void __tsan_atomic_signal_fence(int) {}

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
ATOMIC(8)
ATOMIC(32)
ATOMIC(64)

// The linker sends calls of memcpy here (--wrap).
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  read(from, bytes);
  write(to, bytes);
  return __real_memcpy(to, from, bytes);
}

}  // extern "C"
// NOLINTEND
