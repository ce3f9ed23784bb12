#include "core/process.hpp"

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define NPATTN_POSIX 1
#endif

namespace npattn {
namespace {

std::atomic<std::uint32_t> number{0};

} // namespace

std::uint32_t process_number() noexcept {
#ifdef NPATTN_POSIX
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { number.fetch_add(1, std::memory_order_relaxed); });
#endif
    return number.load(std::memory_order_relaxed);
}

} // namespace npattn
