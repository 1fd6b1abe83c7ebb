// Lets an extension that was built on a new Linux load on one with glibc 2.28 (the wheels' manylinux_2_28).
//
// The linker binds each function of libc and libstdc++ to the newest version that the building machine has. A few of those
// that we use got a new version lately without changing (glibc 2.34 took in libpthread), or exist since lately only: one of
// them is enough for an old system to refuse the whole extension. Each is defined here again, hidden, so that our own
// objects use it and nobody else does, and calls the version that all systems have. A new one that slips in is named by
// `auditwheel` in `make wheel`.
//
// Not under sanitizers, which put functions of their own in the place of libc's.
#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 32)
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

#include "common/old_glibc.h"

#define TDDP_HIDDEN __attribute__((visibility("hidden")))

// `name` as it was in `version`, under the name `old_name`.
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

// libstdc++ counts without atomic instructions where this says that there is one thread. 0 means "not known", and is always
// right.
TDDP_HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

TDDP_HIDDEN int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept { return old_pthread_mutex_trylock(mutex); }

TDDP_HIDDEN int pthread_once(pthread_once_t* control, void (*routine)()) { return old_pthread_once(control, routine); }

TDDP_HIDDEN int pthread_setname_np(pthread_t thread, const char* name) noexcept {
  return old_pthread_setname_np(thread, name);
}

// Before 2.33 inline functions of the headers that called these.
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

// std::condition_variable::wait_for(). glibc has it since 2.30; before, libstdc++ waited as is done below, by the clock of
// the calendar: whoever sets that back meanwhile makes the wait longer.
TDDP_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* deadline) {
  using Clockwait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto own = reinterpret_cast<Clockwait>(old_dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (own != nullptr) {
    return own(condition, mutex, clock, deadline);
  }
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
