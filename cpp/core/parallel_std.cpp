// Helpers as std::threads. For machines without OpenMP, and for thread sanitizers, which cannot see into
// libgomp.
#ifdef NPATTN_PARALLEL_STD

#include "core/parallel_team.hpp"

namespace npattn {

int openmp_limit() noexcept { return 0; }

const char* parallel_runtime() noexcept { return "std"; }

namespace detail {

static void serve(Team& team) {
    for (std::uint32_t seen = 0;;) {
        seen = team.wait_for_job(seen);
        team.help(seen);
    }
}

int add_helpers(Team& team, int present, int wanted) noexcept {
    while (present < wanted && start_thread(serve, team)) {
        ++present;
    }
    return present;
}

int waiting_threads(int helpers) noexcept { return helpers; }

} // namespace detail
} // namespace npattn

#endif
