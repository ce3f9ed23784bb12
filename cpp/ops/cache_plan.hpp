#pragma once
// The parts of the keys of several sequences, where they are not computed one sequence after the other: who
// shares which, and where their partial results go.

#include <cstddef>
#include <vector>

#include "ops/cache_parts.hpp"

namespace npattn {

// A part of the keys and the sequences that have it, all with as many queries; their rows lie one sequence behind
// the other in its partial result.
struct PlannedPart {
    KeyPart keys;
    std::vector<std::int64_t> sequences;
    std::size_t offset = 0; // of the partial result within a head's
};

// A part of a sequence and the place of the sequence in it.
struct PlannedPlace {
    std::size_t part;
    std::int64_t member;
};

class CachePlan {
public:
    // Keys of a part: whole key blocks of the kernels.
    static constexpr std::int64_t KEY_RANGE = 512;

    explicit CachePlan(const KVStore& store) : store_(store) {}

    // The parts of a sequence, in order. With `most_members` > 1, where so many may share one: a part that others
    // were given before, whose keys are all in the same pages and seen by all of the queries, becomes theirs
    // together.
    std::vector<PlannedPlace> add(std::int64_t sequence, std::int64_t slot, std::int64_t queries, bool causal,
                                  std::int64_t left, std::int64_t most_members);

    std::vector<PlannedPart>& parts() { return parts_; }
    const std::vector<PlannedPart>& parts() const { return parts_; }

private:
    struct Shared { // what a part is known by
        std::size_t part;
        std::int64_t slot, queries, most_members;
    };
    const std::size_t* find(std::int64_t range, std::int64_t slot, std::int64_t queries) const;

    const KVStore& store_;
    std::vector<PlannedPart> parts_;
    std::vector<std::vector<Shared>> shared_; // of each range
};

} // namespace npattn
