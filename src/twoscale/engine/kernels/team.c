/* Threads that share the work of one kernel call, beside other programs too.
 *
 * A kernel is a sequence of phases, each of so many items, and a phase begins when all items of the one before are done. Threads claim items
 * as they find time. Nobody waits for a thread, only for items that a thread has claimed: a helper that the system has not scheduled is not
 * missed, and the calling thread alone can do all of the work. OpenMP's barriers wait for every thread, and with one core taken by another
 * program that made decoding a hundred times slower.
 *
 * A thread that waits spins for SPIN_NS at the most and then sleeps. There is one team for the process; a call that finds it in use runs in its
 * own thread alone. Results never depend on the number of threads.
 *
 * A helper may be late: it then still runs the task of a call that has ended. So every call has a number, a claim succeeds only under the
 * number of the call that is open, and before its first claim a task reads nothing but its own copy of the arguments.
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
#define MAX_ARGUMENTS 256
#ifndef SPIN_NS
#define SPIN_NS 200000
#endif

/* What one thread knows of the call that it works on. */
typedef struct {
    int part, parts; /* its number, below `parts` */
    uint32_t call;
    int phase;
} Member;

typedef void (*Task)(const void *arguments, Member *me);

/* Items of a phase that a thread has claimed: first .. last - 1. */
typedef struct {
    int count, grab, first, last, mine;
} Span;

static struct {
    pthread_mutex_t owner; /* held by the call that uses the team */
    pthread_mutex_t lock;  /* guards sleeping */
    pthread_cond_t wake;
    int sleepers, workers;
    uint32_t call;
    Task task;
    int parts;
    char arguments[MAX_ARGUMENTS] __attribute__((aligned(16)));
    struct {
        uint64_t next, done; /* the call's number in the upper half, a count in the lower */
    } phases[MAX_PHASES] __attribute__((aligned(64)));
} team = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
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

/* Wakes those that sleep, after something that they may wait for has changed. */
static void wake_all(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&team.lock);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.lock);
}

/* Whether a word's count has come to `least`, or the word belongs to another call. */
static int changed(const uint64_t *word, uint32_t call, uint32_t least) {
    uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return (uint32_t)(value >> 32) != call || (uint32_t)value >= least;
}

static void wait_for(const uint64_t *word, uint32_t call, uint32_t least, int64_t spin) {
    if (changed(word, call, least)) return;
    int64_t until = spin ? nanoseconds() + spin : 0;
    while (spin && nanoseconds() < until)
        for (int i = 0; i < 32; i++) {
            relax();
            if (changed(word, call, least)) return;
        }
    pthread_mutex_lock(&team.lock);
    __atomic_add_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* with the fence in wake_all: either the change is seen here, or the sleeper there */
    while (!changed(word, call, least)) pthread_cond_wait(&team.wake, &team.lock);
    __atomic_sub_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team.lock);
}

/* Begins the next phase: `count` items, claimed `grab` at a time. */
static inline Span phase(Member *me, int count, int grab) {
    assert(me->phase < MAX_PHASES);
    me->phase++;
    return (Span){.count = count, .grab = me->parts == 1 ? count : grab > 0 ? grab : 1};
}

/* Claims items; 0 when none are left. */
static inline int claim(const Member *me, Span *s) {
    if (me->parts == 1) {
        s->first = s->last, s->last = s->count;
        return s->first < s->last;
    }
    uint64_t *word = &team.phases[me->phase - 1].next, value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    do {
        if ((uint32_t)(value >> 32) != me->call || (int)(uint32_t)value >= s->count) return 0;
    } while (!__atomic_compare_exchange_n(word, &value, value + s->grab, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    s->first = (int)(uint32_t)value;
    s->last = s->first + s->grab < s->count ? s->first + s->grab : s->count;
    s->mine += s->last - s->first;
    return 1;
}

/* Ends a phase: returns 1 when all of its items are done, 0 where the call is over and the task must return. */
static inline int settled(const Member *me, Span *s) {
    if (me->parts == 1) return 1;
    uint64_t *word = &team.phases[me->phase - 1].done;
    if (s->mine && (int)(uint32_t)__atomic_add_fetch(word, s->mine, __ATOMIC_ACQ_REL) == s->count) wake_all();
    wait_for(word, me->call, s->count, SPIN_NS);
    return (uint32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) >> 32) == me->call;
}

/* Items that a thread claims at a time, so that each has several turns. */
static inline int several(const Member *me, int count) { return count / (4 * me->parts); }

static void *work(void *number) {
    char arguments[MAX_ARGUMENTS] __attribute__((aligned(16)));
    Member me = {.part = (int)(intptr_t)number};
    uint32_t seen = 0;
    for (;;) {
        wait_for(&team.phases[0].next, seen, UINT32_MAX, me.part < me.parts ? SPIN_NS : 0); /* one that was not needed does not spin */
        seen = me.call = (uint32_t)(__atomic_load_n(&team.phases[0].next, __ATOMIC_ACQUIRE) >> 32);
        if (seen & 1) continue; /* odd: the next call is being written */
        Task task = __atomic_load_n(&team.task, __ATOMIC_ACQUIRE);
        me.parts = __atomic_load_n(&team.parts, __ATOMIC_ACQUIRE);
        memcpy(arguments, team.arguments, sizeof arguments);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if ((uint32_t)(__atomic_load_n(&team.phases[0].next, __ATOMIC_ACQUIRE) >> 32) != me.call) continue; /* copied too late */
        if (me.part >= me.parts) continue;
        me.phase = 0;
        task(arguments, &me);
    }
    return 0;
}

/* The child of a fork has no helpers. */
static void forget_helpers(void) {
    team.call += team.call & 1; /* another thread may have been about to open a call */
    team.workers = team.sleepers = 0;
    pthread_mutex_init(&team.owner, 0);
    pthread_mutex_init(&team.lock, 0);
    pthread_cond_init(&team.wake, 0);
}

static void start_helpers(int threads) {
    static int first = 1;
    if (first) pthread_atfork(0, 0, forget_helpers);
    first = 0;
    while (team.workers < threads - 1) {
        pthread_t thread;
        pthread_attr_t detached;
        sigset_t every, before; /* signals are for the program's own threads */
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, work, (void *)(intptr_t)(team.workers + 1));
        pthread_attr_destroy(&detached);
        pthread_sigmask(SIG_SETMASK, &before, 0);
        if (failed) return;
        team.workers++;
    }
}

/* Runs a task of at least one phase with up to `threads` threads; its arguments are a struct. */
#define RUN(threads, task, a)                                                                          \
    do {                                                                                               \
        _Static_assert(sizeof(a) <= MAX_ARGUMENTS, "arguments of a task are copied");                 \
        run(threads, task, &a, sizeof a);                                                              \
    } while (0)

static void run(int threads, Task task, const void *arguments, size_t size) {
    Member me = {.part = 0, .parts = threads < 1 ? 1 : threads < MAX_THREADS ? threads : MAX_THREADS};
    if (me.parts == 1 || pthread_mutex_trylock(&team.owner)) {
        me.parts = 1;
        task(arguments, &me);
        return;
    }
    start_helpers(me.parts);
    __atomic_store_n(&team.phases[0].next, (uint64_t)++team.call << 32, __ATOMIC_SEQ_CST); /* odd: nobody reads what follows */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(&team.task, task, __ATOMIC_RELEASE);
    __atomic_store_n(&team.parts, me.parts, __ATOMIC_RELEASE);
    memcpy(team.arguments, arguments, size);
    me.call = ++team.call;
    for (int i = MAX_PHASES - 1; i >= 0; i--) { /* the first one last: it opens the call */
        __atomic_store_n(&team.phases[i].done, (uint64_t)me.call << 32, __ATOMIC_RELEASE);
        __atomic_store_n(&team.phases[i].next, (uint64_t)me.call << 32, __ATOMIC_RELEASE);
    }
    wake_all();
    task(arguments, &me);
    pthread_mutex_unlock(&team.owner);
}
