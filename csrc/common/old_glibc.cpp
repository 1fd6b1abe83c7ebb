// Lets an extension built on a new Linux load on one with glibc 2.28 (manylinux_2_28 wheels).
//
// The linker binds each function of libc and libstdc++ to the newest version on the build machine. Some functions that we use
// recently got a new version without changing (glibc 2.34 merged libpthread) or are recent additions; one of them is enough for
// an older system to refuse the whole extension. Each is defined again here, hidden so that only our objects use it, and calls
// the version that every system has. If a new one slips in, `auditwheel` names it in `make wheel`.
//
// Not under sanitizers, which replace libc's functions with their own.
#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 32)
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

#include "common/old_glibc.h"

#define TDDP_HIDDEN __attribute__((visibility("hidden")))

// Makes version `version` of `name` available as `old_name`.
#define TDDP_OLD_VERSION(name, version) __asm__(".symver old_" #name "," #name "@" version)

TDDP_OLD_VERSION(dlsym, "GLIBC_2.2.5");
TDDP_OLD_VERSION(pthread_mutex_trylock, "GLIBC_2.2.5");
TDDP_OLD_VERSION(pthread_once, "GLIBC_2.2.5");
TDDP_OLD_VERSION(pthread_setname_np, "GLIBC_2.12");
TDDP_OLD_VERSION(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");

// NOLINTBEGIN(readability-identifier-naming): the names are those of libc and libstdc++
extern "C" {
void* old_dlsym(void* handle, const char* name);
int old_pthread_mutex_trylock(pthread_mutex_t* mutex);
int old_pthread_once(pthread_once_t* control, void (*routine)());
int old_pthread_setname_np(pthread_t thread, const char* name);
void old__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* condition, void* lock);

// libstdc++ skips atomic instructions where this says that there is only one thread. 0 means "unknown", which is always safe.
TDDP_HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

TDDP_HIDDEN int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept { return old_pthread_mutex_trylock(mutex); }

TDDP_HIDDEN int pthread_once(pthread_once_t* control, void (*routine)()) { return old_pthread_once(control, routine); }

TDDP_HIDDEN int pthread_setname_np(pthread_t thread, const char* name) noexcept {
  return old_pthread_setname_np(thread, name);
}

// Before glibc 2.33 these were inline functions of the headers that called the following.
int __fxstat(int version, int fd, struct stat* info) noexcept;
int __xstat(int version, const char* path, struct stat* info) noexcept;
TDDP_HIDDEN int fstat(int fd, struct stat* info) noexcept { return __fxstat(1, fd, info); }
TDDP_HIDDEN int stat(const char* path, struct stat* info) noexcept { return __xstat(1, path, info); }

// std::condition_variable::wait(std::unique_lock<std::mutex>&)
TDDP_HIDDEN void torchddp_condition_variable_wait(void* condition, void* lock) __asm__(
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void torchddp_condition_variable_wait(void* condition, void* lock) {
  old__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(condition, lock);
}

// std::condition_variable::wait_for(). glibc has this since 2.30. Before, libstdc++ waited as below, by the calendar clock, so
// setting that clock back makes the wait longer.
TDDP_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* deadline) {
  using Clockwait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto own = reinterpret_cast<Clockwait>(old_dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (own != nullptr) return own(condition, mutex, clock, deadline);
  timespec now{};
  timespec calendar{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &calendar);
  const timespec until = torchddp::calendar_deadline(*deadline, now, calendar);
  return pthread_cond_timedwait(condition, mutex, &until);
}
}  // extern "C"
// NOLINTEND(readability-identifier-naming)
#endif
#endif
