#include "ops/cache_plan.hpp"

namespace npattn {

std::vector<PlannedPlace> CachePlan::add(std::int64_t sequence, std::int64_t slot, std::int64_t queries,
                                         bool causal, std::int64_t left, std::int64_t most_members) {
    const std::int64_t length = store_.length(slot);
    const std::int64_t seen_by_all = causal ? length - queries + 1 : length;
    bool may_share = most_members > 1;
    std::vector<PlannedPlace> places;
    SeenKeys(store_.settings(), length, queries, left).for_each_part(KEY_RANGE, [&](const KeyPart& keys) {
        may_share = may_share && keys.last - keys.first == KEY_RANGE && keys.last <= seen_by_all &&
                    store_.shared(slot, keys.first / store_.layout().page_keys);
        const std::int64_t range = keys.first / KEY_RANGE;
        const std::size_t* found = may_share ? find(range, slot, queries) : nullptr;
        const std::size_t part = found ? *found : parts_.size();
        if (!found) {
            parts_.push_back({keys, {}});
            if (may_share) {
                shared_.resize(std::max(shared_.size(), static_cast<std::size_t>(range) + 1));
                shared_[static_cast<std::size_t>(range)].push_back({part, slot, queries, most_members});
            }
        }
        places.push_back({part, static_cast<std::int64_t>(parts_[part].sequences.size())});
        parts_[part].sequences.push_back(sequence);
    });
    return places;
}

// The part of others that holds range `range` of the sequence in the same pages, or null.
const std::size_t* CachePlan::find(std::int64_t range, std::int64_t slot, std::int64_t queries) const {
    if (static_cast<std::size_t>(range) >= shared_.size()) return nullptr;
    const std::int64_t page_keys = store_.layout().page_keys;
    const std::int64_t first = range * KEY_RANGE / page_keys;
    const std::int64_t last = store_.layout().pages((range + 1) * KEY_RANGE);
    const char* const* pages = store_.pages(slot);
    for (const Shared& other : shared_[static_cast<std::size_t>(range)]) {
        const auto members = static_cast<std::int64_t>(parts_[other.part].sequences.size());
        if (other.queries == queries && members < other.most_members &&
            std::equal(pages + first, pages + last, store_.pages(other.slot) + first))
            return &other.part;
    }
    return nullptr;
}

} // namespace npattn
