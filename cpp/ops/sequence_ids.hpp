#pragma once
// The sequences of a paged cache by their ids: numbers counted up from 0, none of which comes twice.

#include <cstdint>
#include <map>

namespace npattn {

class SequenceIds {
public:
    std::int64_t next() const { return next_; }
    const std::map<std::int64_t, std::int64_t>& slots() const { return slots_; } // by id

    // The slot of a sequence; -1 where none has this id.
    std::int64_t slot(std::int64_t id) const {
        const auto found = slots_.find(id);
        return found == slots_.end() ? -1 : found->second;
    }

    // The next id, for the slot that `take()` returns. What it throws leaves everything as it was.
    template <class Take> std::int64_t add(Take&& take) {
        const auto place = slots_.emplace_hint(slots_.end(), next_, -1);
        try {
            place->second = take();
        } catch (...) {
            slots_.erase(place);
            throw;
        }
        return next_++;
    }

    void set(std::int64_t id, std::int64_t slot) { slots_[id] = slot; }
    void set_next(std::int64_t next) { next_ = next; }
    void remove(std::int64_t id) { slots_.erase(id); }

private:
    std::map<std::int64_t, std::int64_t> slots_;
    std::int64_t next_ = 0;
};

} // namespace npattn
