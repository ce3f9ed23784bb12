#pragma once
// Which process this is, in a line of forks.

#include <cstdint>

namespace npattn {

// A number that a child forked after the first call does not share with its parent, nor with any of its own
// ancestors since then.
std::uint32_t process_number() noexcept;

} // namespace npattn
