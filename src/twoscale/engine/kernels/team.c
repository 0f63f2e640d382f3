/* A thread pool that runs one kernel call at a time and stays fast when other programs use the cores.
 *
 * A kernel is a sequence of phases. A phase has a number of items and begins when all items of the previous phase are done. Threads claim
 * items dynamically. A thread waits only for items that another thread has claimed, never for a thread: if the system does not schedule the
 * helper threads, the calling thread does all items itself. OpenMP's barriers wait for every thread; with one core taken by another program
 * that made decoding a hundred times slower.
 *
 * A waiting thread spins for at most SPIN_NS and then sleeps. There is one pool for the process; a call that finds it in use runs in its own
 * thread only. Results do not depend on the number of threads.
 *
 * A helper may be late and still run the task of a call that has ended. So every call has a number, a claim succeeds only for the current
 * call's number, and before its first claim a task reads nothing but its own copy of the arguments.
 */

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MAX_THREADS 64
#define MAX_PHASES 12
#define MAX_ARGUMENTS 384 /* bytes of a task's arguments, which are copied for every helper */
#ifndef SPIN_NS
#define SPIN_NS 200000
#endif

/* One thread's view of the current call. */
typedef struct {
    int index, n_threads; /* 0 <= index < n_threads; 0 is the calling thread */
    uint32_t call; /* number of the call */
    int phase; /* phases begun so far */
} Thread;

typedef void (*Task)(const void *arguments, Thread *self);

/* A phase of `count` items as one thread sees it. The items that it has claimed last are first .. last - 1. */
typedef struct {
    int count, per_claim, first, last, n_claimed;
} Phase;

static struct {
    pthread_mutex_t in_use; /* locked while a call runs */
    pthread_mutex_t lock;   /* for the condition variable `wake` */
    pthread_cond_t wake;
    int n_sleeping, n_helpers;
    uint32_t call;
    Task task;
    int n_threads;
    char arguments[MAX_ARGUMENTS] __attribute__((aligned(16)));
    struct {
        uint64_t next, done; /* upper 32 bits: number of the call; lower 32 bits: items claimed, items done */
    } phases[MAX_PHASES] __attribute__((aligned(64)));
} team = {.in_use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Wakes the sleeping threads after a counter has changed. */
static void wake_all(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.n_sleeping, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&team.lock);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.lock);
}

/* Whether the count in `word` has reached `target`, or this call is over (stale): the word belongs to another one. */
static int reached_or_stale(const uint64_t *word, uint32_t call, uint32_t target) {
    uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return (uint32_t)(value >> 32) != call || (uint32_t)value >= target;
}

static void wait_for(const uint64_t *word, uint32_t call, uint32_t target, int64_t spin) {
    if (reached_or_stale(word, call, target)) return;
    int64_t until = spin ? nanoseconds() + spin : 0;
    while (spin && nanoseconds() < until)
        for (int i = 0; i < 32; i++) {
            cpu_pause();
            if (reached_or_stale(word, call, target)) return;
        }
    pthread_mutex_lock(&team.lock);
    __atomic_add_fetch(&team.n_sleeping, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* pairs with the fence in wake_all: either this thread sees the change, or wake_all sees n_sleeping > 0 */
    while (!reached_or_stale(word, call, target)) pthread_cond_wait(&team.wake, &team.lock);
    __atomic_sub_fetch(&team.n_sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team.lock);
}

/* Begins the next phase: `count` items, claimed `per_claim` at a time. */
static inline Phase begin_phase(Thread *self, int count, int per_claim) {
    assert(self->phase < MAX_PHASES);
    self->phase++;
    return (Phase){.count = count, .per_claim = self->n_threads == 1 ? count : per_claim > 0 ? per_claim : 1};
}

/* Claims the next items; returns 0 if none are left. */
static inline int claim(const Thread *self, Phase *phase) {
    if (self->n_threads == 1) {
        phase->first = phase->last, phase->last = phase->count;
        return phase->first < phase->last;
    }
    uint64_t *word = &team.phases[self->phase - 1].next, value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    do {
        if ((uint32_t)(value >> 32) != self->call || (int)(uint32_t)value >= phase->count) return 0;
    } while (!__atomic_compare_exchange_n(word, &value, value + phase->per_claim, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    phase->first = (int)(uint32_t)value;
    phase->last = phase->first + phase->per_claim < phase->count ? phase->first + phase->per_claim : phase->count;
    phase->n_claimed += phase->last - phase->first;
    return 1;
}

/* Waits until all items of the phase are done and returns 1. Returns 0 if the call is already over, which only happens in a helper thread
 * that was scheduled late: the other threads have done all items, and the task must return at once. */
static inline int finish_phase(const Thread *self, Phase *phase) {
    if (self->n_threads == 1) return 1;
    uint64_t *word = &team.phases[self->phase - 1].done;
    if (phase->n_claimed && (int)(uint32_t)__atomic_add_fetch(word, phase->n_claimed, __ATOMIC_ACQ_REL) == phase->count) wake_all();
    wait_for(word, self->call, phase->count, SPIN_NS);
    return (uint32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) >> 32) == self->call;
}

/* Items per claim such that each thread claims about four times. */
static inline int items_per_claim(const Thread *self, int count) { return count / (4 * self->n_threads); }

static void *helper_main(void *index) {
    char arguments[MAX_ARGUMENTS] __attribute__((aligned(16)));
    Thread self = {.index = (int)(intptr_t)index};
    uint32_t seen = 0;
    for (;;) {
        wait_for(&team.phases[0].next, seen, UINT32_MAX, self.index < self.n_threads ? SPIN_NS : 0); /* a helper that the last call did not use does not spin */
        seen = self.call = (uint32_t)(__atomic_load_n(&team.phases[0].next, __ATOMIC_ACQUIRE) >> 32);
        if (seen & 1) continue; /* odd: the next call is being set up */
        Task task = __atomic_load_n(&team.task, __ATOMIC_ACQUIRE);
        self.n_threads = __atomic_load_n(&team.n_threads, __ATOMIC_ACQUIRE);
        memcpy(arguments, team.arguments, sizeof arguments);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if ((uint32_t)(__atomic_load_n(&team.phases[0].next, __ATOMIC_ACQUIRE) >> 32) != self.call) continue; /* another call began while the arguments were copied */
        if (self.index >= self.n_threads) continue;
        self.phase = 0;
        task(arguments, &self);
    }
    return 0;
}

/* After a fork the child process has no helper threads. */
static void reset_after_fork(void) {
    team.call += team.call & 1; /* the fork may have happened while a call was being set up */
    team.n_helpers = team.n_sleeping = 0;
    pthread_mutex_init(&team.in_use, 0);
    pthread_mutex_init(&team.lock, 0);
    pthread_cond_init(&team.wake, 0);
}

static void start_helpers(int threads) {
    static int first = 1;
    if (first) pthread_atfork(0, 0, reset_after_fork);
    first = 0;
    while (team.n_helpers < threads - 1) {
        pthread_t thread;
        pthread_attr_t detached;
        sigset_t every, before; /* helpers block all signals: the program's own threads handle them */
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, helper_main, (void *)(intptr_t)(team.n_helpers + 1));
        pthread_attr_destroy(&detached);
        pthread_sigmask(SIG_SETMASK, &before, 0);
        if (failed) return;
        team.n_helpers++;
    }
}

/* Runs a task of at least one phase with up to `threads` threads; its arguments are the struct `a`. */
#define RUN_TASK(threads, task, a)                                                                          \
    do {                                                                                               \
        _Static_assert(sizeof(a) <= MAX_ARGUMENTS, "arguments of a task are copied");                 \
        run(threads, task, &a, sizeof a);                                                              \
    } while (0)

static void run(int threads, Task task, const void *arguments, size_t size) {
    Thread self = {.index = 0, .n_threads = threads < 1 ? 1 : threads < MAX_THREADS ? threads : MAX_THREADS};
    if (self.n_threads == 1 || pthread_mutex_trylock(&team.in_use)) {
        self.n_threads = 1;
        task(arguments, &self);
        return;
    }
    start_helpers(self.n_threads);
    __atomic_store_n(&team.phases[0].next, (uint64_t)++team.call << 32, __ATOMIC_SEQ_CST); /* odd: the call is being set up, helpers must not read the fields below */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(&team.task, task, __ATOMIC_RELEASE);
    __atomic_store_n(&team.n_threads, self.n_threads, __ATOMIC_RELEASE);
    memcpy(team.arguments, arguments, size);
    self.call = ++team.call;
    for (int i = MAX_PHASES - 1; i >= 0; i--) { /* phase 0 last: it starts the call */
        __atomic_store_n(&team.phases[i].done, (uint64_t)self.call << 32, __ATOMIC_RELEASE);
        __atomic_store_n(&team.phases[i].next, (uint64_t)self.call << 32, __ATOMIC_RELEASE);
    }
    wake_all();
    task(arguments, &self);
    pthread_mutex_unlock(&team.in_use);
}
