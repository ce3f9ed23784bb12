// The team: how helpers wait for a job, join it and leave it; fork.
#include "core/parallel_team.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define NPATTN_POSIX 1
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define NPATTN_X86 1
#endif

namespace npattn {
namespace detail {
namespace {

constexpr std::int64_t refused_period = 1000;                 // milliseconds before asking for threads again
constexpr auto idle_spin = std::chrono::microseconds(100);    // of a helper that has no job
constexpr auto lately = std::chrono::microseconds(150);       // between calls that idle_spin bridges
constexpr auto finish_spin = std::chrono::microseconds(1000); // of a caller whose helpers are still at work
constexpr int most_placed = 8; // helpers that a caller places as it wakes them: two system calls each

std::atomic<Team*> process_team{nullptr};

void pause() noexcept {
#ifdef NPATTN_X86
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until done() or for as long as `duration`; returns done().
template <class Done> bool spin(Done done, std::chrono::microseconds duration) noexcept {
    const auto end = std::chrono::steady_clock::now() + duration;
    do {
        for (int i = 0; i < 16; ++i) {
            if (done()) {
                return true;
            }
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

} // namespace

Team* Team::acquire() {
    Team* team = process_team.load(std::memory_order_acquire);
    if (team == nullptr) {
#ifdef NPATTN_POSIX
        // The helpers do not exist in a child, and the locks may be held there: it makes a team of its own
        // when it needs one.
        static const int registered =
            pthread_atfork(nullptr, nullptr, [] { process_team.store(nullptr, std::memory_order_relaxed); });
        if (registered != 0) {
            return nullptr;
        }
#endif
        Team* const made = new Team;
        if (process_team.compare_exchange_strong(team, made, std::memory_order_acq_rel)) {
            team = made;
        } else {
            delete made;
        }
    }
    return team->busy_.exchange(true, std::memory_order_acquire) ? nullptr : team;
}

bool Team::of_this_process() const noexcept { return process_team.load(std::memory_order_relaxed) == this; }

bool Team::is_awake() const noexcept { return sleepers_.load() < waiting_threads(helpers()); }

// Opens `job` for threads - 1 helpers, works on it, closes it, and waits for the helpers that have joined.
void Team::run(Job& job, int threads) noexcept {
    const int seats = gather(threads - 1);
    job.team = this;
    job_ = &job;
    threads_ = seats + 1;
    spin_.store(threads_ <= cpus_, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const std::uint64_t closed = static_cast<std::uint64_t>(job_number() + 1) << 32;
    gate_.store(closed | static_cast<std::uint64_t>(seats));
    const int awake = waiting_threads(helpers()) - sleepers_.load();
    if (const int missing = waiting_threads(seats) - awake; missing > 0) {
        wake(missing);
    }
    job.work(0, true);
    const std::uint64_t last = gate_.exchange(closed, std::memory_order_acq_rel);
    wait_for_helpers(job, seats - static_cast<int>(last & 0xffffffffu));
}

// Makes missing helpers; returns how many of `wanted` there are.
int Team::gather(int wanted) noexcept {
    const int present = helpers();
    if (wanted > present && (refused_ < 0 || milliseconds() - refused_ >= refused_period)) {
        const int made = add_helpers(*this, present, wanted);
        refused_ = made < wanted ? milliseconds() : -1;
        helpers_.store(made, std::memory_order_relaxed);
    }
    return std::min(wanted, helpers());
}

void Team::wake(int wanted) noexcept {
    {
        // With the lock once held, a helper has either seen the job or is where notify reaches it.
        const std::lock_guard<std::mutex> lock(mutex_);
        int placed = 0;
        for (Sleeper* one = sleeping_; one != nullptr && placed < most_placed; one = one->next) {
            one->avoid_this_cpu();
            ++placed;
        }
    }
    if (wanted >= sleepers_.load()) {
        opened_.notify_all();
        return;
    }
    for (int i = 0; i < wanted; ++i) {
        opened_.notify_one();
    }
}

void Team::wait_for_helpers(Job& job, int joined) noexcept {
    const auto done = [&] { return finished_.load() == joined; };
    if (done() || (spin_.load(std::memory_order_relaxed) && spin(done, finish_spin))) {
        return;
    }
    caller_sleeps_.store(true);
    while (of_this_process()) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (left_.wait_for(lock, std::chrono::milliseconds(signal_period), done)) {
                break;
            }
        }
        job.check_signals();
    }
    caller_sleeps_.store(false);
}

std::uint32_t Team::wait_for_job(std::uint32_t seen) noexcept {
    const auto opened = [&] { return job_number() != seen; };
    if (!opened() && !(spin_.load(std::memory_order_relaxed) && spin(opened, idle_spin))) {
        std::unique_lock<std::mutex> lock(mutex_);
        Sleeper self;
        self.next = sleeping_;
        sleeping_ = &self;
        sleepers_.fetch_add(1);
        opened_.wait(lock, opened);
        sleepers_.fetch_sub(1);
        Sleeper** place = &sleeping_;
        while (*place != &self) {
            place = &(*place)->next;
        }
        *place = self.next;
        lock.unlock();
        self.lift_ban();
    }
    return job_number();
}

void Team::help(std::uint32_t job) noexcept {
    std::uint64_t gate = gate_.load();
    do {
        if (gate >> 32 != job || (gate & 0xffffffffu) == 0) {
            return;
        }
    } while (!gate_.compare_exchange_weak(gate, gate - 1));
    job_->work(threads_ - static_cast<int>(gate & 0xffffffffu), false);
    // From here on the job may be gone.
    finished_.fetch_add(1);
    if (caller_sleeps_.load()) {
        { const std::lock_guard<std::mutex> lock(mutex_); }
        left_.notify_one();
    }
}

bool start_thread(void (*function)(Team&), Team& team) noexcept {
#ifdef NPATTN_POSIX
    // All but the signals of a fault, which faulthandler wants to see in the thread that made it.
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
        sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
#endif
    bool started = true;
    try {
        std::thread(function, std::ref(team)).detach();
    } catch (const std::exception&) { // system_error or bad_alloc
        started = false;
    }
#ifdef NPATTN_POSIX
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return started;
}

} // namespace detail

bool team_is_warm() noexcept {
    static std::atomic<std::chrono::steady_clock::time_point> asked{};
    const auto now = std::chrono::steady_clock::now();
    const auto before = asked.exchange(now, std::memory_order_relaxed);
    const detail::Team* const team = detail::process_team.load(std::memory_order_acquire);
    return (team != nullptr && team->is_awake()) || now - before < detail::lately;
}

} // namespace npattn
