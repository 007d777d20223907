// Parts of a call on several threads. They wait awake for what comes next while a call lasts, and for a
// little while after it; then they sleep.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <unistd.h>
#if defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX std::this_thread::yield()
#endif

class Crew {
    const int64_t AWAKE = 20000, PATIENCE = 2000;  // looks before it sleeps; before another thread's turn
    std::mutex busy, bed;
    std::condition_variable woken;
    std::atomic<int64_t> turn{0}, left{0}, asleep{0};
    std::function<void(int64_t)> work;
    int64_t members = 1, process = getpid();  // the caller among them

    void serve(int64_t own, int64_t seen) {
        for (;; left.fetch_sub(1)) {
            for (int64_t i = 0; i < AWAKE && turn.load() == seen; i++) RELAX;
            if (turn.load() == seen) {
                std::unique_lock lock(bed);
                asleep++;
                woken.wait(lock, [&] { return turn.load() != seen; });
                asleep--;
            }
            seen++;
            work(own);
        }
    }

  public:
    // One for all of a process; a fork has none of its threads, and gets its own.
    static Crew &here() {
        static std::mutex guard;
        static Crew *made = nullptr;
        std::lock_guard lock(guard);
        if (!made || made->process != getpid()) made = new Crew;
        return *made;
    }
    // part(0) to part(count - 1), each on a thread of its own; on this one alone while another caller has
    // the crew.
    void run(int64_t count, const std::function<void(int64_t)> &part) {
        std::unique_lock lock(busy, std::try_to_lock);
        if (!lock || count < 2) {
            for (int64_t i = 0; i < count; i++) part(i);
            return;
        }
        for (; members < count; members++)
            std::thread(&Crew::serve, this, members, turn.load()).detach();
        work = [&](int64_t own) {
            if (own < count) part(own);
        };
        left = members - 1;
        turn++;
        if (asleep.load()) {
            { std::lock_guard wake(bed); }
            woken.notify_all();
        }
        part(0);
        for (int64_t i = 0; left.load(); i++)
            if (i < PATIENCE) RELAX;
            else std::this_thread::yield();
    }
};

static thread_local int64_t threads = 1;  // of the call that this thread is in
struct Threads {
    int64_t before = threads;
    Threads(int64_t count) { threads = count; }
    ~Threads() { threads = before; }
};
// part(first, last) of `count` things, on all threads of the call where it is worth it. work: the numbers
// that are read or made.
template <class Part>
static void split(int64_t count, int64_t work, const Part &part) {
    int64_t parts = threads < count ? threads : count;
    if (parts < 2 || work < 1 << 17) return part(0, count);
    Crew::here().run(parts, [&](int64_t own) { part(count * own / parts, count * (own + 1) / parts); });
}
