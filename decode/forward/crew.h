// Parts of a call on several threads. They wait awake for what comes next while a call lasts, and for a
// little while after it; then they sleep.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>
#if defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX std::this_thread::yield()
#endif

class Crew {
    const int64_t AT_ONCE = 200, AWAKE = 700;  // looks before it lets others go first; before it sleeps
    std::mutex busy, bed;
    std::condition_variable woken;
    std::atomic<int64_t> turn{0}, left{0}, asleep{0};  // turn: its number << 16 | how many take part
    std::function<void(int64_t)> work;
    int64_t members = 1, process = getpid();  // the caller among them

    void rest(int64_t looks) {
        if (looks < AT_ONCE) RELAX;
        else std::this_thread::yield();
    }
    void serve(int64_t own, int64_t seen) {
        for (;;) {
            int64_t now = turn.load();
            for (int64_t i = 0; i < AWAKE && now == seen; i++, now = turn.load()) rest(i);
            if (now == seen) {
                std::unique_lock lock(bed);
                asleep++;
                woken.wait(lock, [&] { return (now = turn.load()) != seen; });
                asleep--;
            }
            seen = now;
            if (own >= (now & 0xFFFF)) continue;
            work(own);
            left--;
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
    // part(0) to part(count - 1) on as many threads, or on those that there may be; on this one alone while
    // another caller has the crew.
    void run(int64_t count, const std::function<void(int64_t)> &part) {
        std::unique_lock lock(busy, std::try_to_lock);
        try {
            for (; lock && members < count; members++)
                std::thread(&Crew::serve, this, members, turn.load()).detach();
        } catch (const std::system_error &) {
        }
        int64_t hands = !lock ? 1 : members < count ? members : count;
        auto share = [&](int64_t own) {
            for (int64_t i = own; i < count; i += hands) part(i);
        };
        if (hands == 1) return share(0);
        work = share, left = hands - 1;
        turn = ((turn >> 16) + 1) << 16 | hands;
        if (asleep.load()) {
            { std::lock_guard wake(bed); }
            woken.notify_all();
        }
        share(0);
        for (int64_t i = 0; left.load(); i++) rest(i);
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
