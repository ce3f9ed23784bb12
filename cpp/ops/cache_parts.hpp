#pragma once
// Which keys of a cached sequence its queries see, and how they are cut into parts that are attended to one by
// one and merged in order.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/kv_store.hpp"

namespace npattn {

// Keys [first, length) are those of the segment, those before `low` no query sees. A cache without sinks has one
// segment; with them it has two, as a window slides over the rest alone.
struct Segment {
    std::int64_t first, length, low;
    std::int64_t left; // the window, as in AttentionCall
};

struct KeyPart {
    int segment;
    std::int64_t first, last;
};

class SeenKeys {
public:
    static constexpr std::int64_t WHOLE = std::numeric_limits<std::int64_t>::max() / 2;

    // Of the last `queries` tokens of `length`; `left` is the caller's window.
    SeenKeys(const StoreSettings& settings, std::int64_t length, std::int64_t queries, std::int64_t left) {
        const std::int64_t place = length - queries;
        const auto lowest = [&](std::int64_t window) {
            return window > place ? 0 : place - window; // window may be unbounded
        };
        std::int64_t first = 0;
        if (settings.sliding_window > 0) {
            first = std::min(settings.sink_tokens, length);
            if (first > 0) segments_[count_++] = {0, first, lowest(left), left};
            left = std::min(left, settings.sliding_window - 1);
        }
        segments_[count_++] = {first, length, std::max(first, lowest(left)), left};
    }

    int segments() const { return count_; }
    const Segment& segment(int index) const { return segments_[index]; }

    // body(part) for every part of up to `range` keys in which a query sees any; or one without keys. `first` of
    // the first part is 0: what is added once for each row is added there.
    template <class Body> void for_each_part(std::int64_t range, Body&& body) const {
        bool begun = false;
        for (int s = 0; s < count_; ++s) {
            const Segment& keys = segments_[s];
            for (std::int64_t start = keys.low / range * range; start < keys.length; start += range) {
                body(KeyPart{s, begun ? std::max(start, keys.first) : 0,
                             std::min(start + range, keys.length)});
                begun = true;
            }
        }
        if (!begun) body(KeyPart{count_ - 1, 0, 0});
    }

private:
    Segment segments_[2];
    int count_ = 0;
};

} // namespace npattn
