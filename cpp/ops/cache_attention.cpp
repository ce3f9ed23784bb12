#include "ops/cache_attention.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "core/aligned_buffer.hpp"
#include "ops/attention_plan.hpp"
#include "ops/attention_problem.hpp"
#include "ops/cache_plan.hpp"

namespace npattn {
namespace {

// A unit is one (sequence, kv head). One with few packed rows goes through its keys in ranges, whose partial
// results are merged in order; one with many goes through them all for each block of rows. Which it is depends on
// the number of rows alone, and ranges begin at the same keys whoever computes them: the bits of a unit depend on
// nothing else.
template <class T> class CacheAttention {
public:
    explicit CacheAttention(const CacheArguments& a)
        : a_(a), whole_(a.dense), kv_heads_(a.store.layout().kv_heads),
          sequences_(static_cast<std::int64_t>(a.slots.size())),
          kernel_bytes_(align_up(kernel_.scratch_bytes(whole_.call()))),
          exact_sums_((a.dense.lse || a.dense.weights) && multiplies_pairs(table_, whole_.call())) {}

    std::int64_t run() {
        double seconds = 0;
        std::int64_t most_queries = 0;
        for (std::int64_t s = 0; s < sequences_; ++s) {
            seconds += seconds_of(s);
            most_queries = std::max(most_queries, queries(s));
        }
        own_rows_ = partial_rows(std::min<std::int64_t>(kernel_.rows, most_queries * group()));
        if (seconds >= ONE_THREAD_SECONDS) {
            const bool worth_waking = seconds >= WAKING_SECONDS || a_.dense.threads == 1 || team_is_warm();
            return run_on(worth_waking ? a_.dense.threads : 1);
        }
        const CallScratch memory(own_bytes(), 0, 1);
        parallel_for(sequences_, 1, [&](std::int64_t s, int) {
            for (std::int64_t h = 0; h < kv_heads_; ++h) {
                for (std::int64_t b = blocks(s); b-- > 0;) compute_block(s, h, b, memory.own());
            }
        });
        return 0;
    }

private:
    // Estimated (a third of it is true of caches that sit in L2): below, threads that sleep are left asleep.
    static constexpr double WAKING_SECONDS = 150e-6;
    static constexpr std::int64_t MOST_MEMBERS = 96;                    // sequences that share a part
    static constexpr std::size_t PARTIAL_BYTES = std::size_t{16} << 20; // at a time
    static constexpr std::int64_t TAIL =
        4; // units a thread that come last, in parts: all threads end together

    // ---- sequences

    std::int64_t group() const { return whole_.call().group; }
    std::int64_t slot(std::int64_t s) const { return a_.slots[static_cast<std::size_t>(s)]; }
    std::int64_t length(std::int64_t s) const { return a_.store.length(slot(s)); }
    std::int64_t queries(std::int64_t s) const { return a_.counts ? a_.counts[s] : whole_.call().query_len; }
    std::int64_t rows(std::int64_t s) const { return queries(s) * group(); }
    bool is_few(std::int64_t s) const { return rows(s) <= kernel_.rows; }
    std::int64_t blocks(std::int64_t s) const {
        return is_few(s) ? 1 : (rows(s) + kernel_.rows - 1) / kernel_.rows;
    }
    SeenKeys seen_keys(std::int64_t s) const {
        return SeenKeys(a_.store.settings(), length(s), queries(s), whole_.call().left);
    }
    double seconds_of(std::int64_t s) const {
        AttentionCall<T> call = call_of(s);
        call.key_len = length(s);
        return unit_seconds(call) * static_cast<double>(kv_heads_);
    }

    AttentionCall<T> call_of(std::int64_t s) const {
        AttentionCall<T> call = whole_.call();
        call.query_len = queries(s);
        return call;
    }

    AttentionUnit<T> unit_of(std::int64_t s, std::int64_t h) const {
        const PageLayout& layout = a_.store.layout();
        const auto head = h * static_cast<std::ptrdiff_t>(layout.head_bytes);
        AttentionUnit<T> unit = whole_.unit(s * kv_heads_ + h);
        unit.query_offset = length(s) - queries(s);
        unit.cache = {a_.store.pages(slot(s)),
                      layout.page_keys,
                      head,
                      head + static_cast<std::ptrdiff_t>(layout.value_offset),
                      head + layout.scales(Side::key),
                      head + layout.scales(Side::value)};
        return unit;
    }

    static void see(const Segment& segment, AttentionCall<T>& call, AttentionUnit<T>& unit) {
        call.left = segment.left;
        unit.key_first = segment.first;
        unit.key_len = segment.length;
    }

    // ---- partial results

    PartialLayout<T> partial_rows(std::int64_t count) const {
        return {count, whole_.call().value_dim, exact_sums_};
    }
    PartialLayout<T> partial_rows(const PlannedPart& part) const { return partial_rows(rows_of(part)); }
    // Of a thread: the kernel's scratch, then two partial results.
    std::size_t own_bytes() const { return kernel_bytes_ + 2 * own_rows_.bytes(); }

    // ---- one unit after the other

    // The rows of a unit, or block b of them if they are many.
    void compute_block(std::int64_t s, std::int64_t h, std::int64_t b, char* memory) const {
        AttentionCall<T> call = call_of(s);
        AttentionUnit<T> unit = unit_of(s, h);
        const std::int64_t first = b * kernel_.rows,
                           last = std::min<std::int64_t>(rows(s), first + kernel_.rows);
        const AttentionPartial<T> whole = own_rows_.at(memory + kernel_bytes_);
        const AttentionPartial<T> part = own_rows_.at(memory + kernel_bytes_ + own_rows_.bytes());
        const SeenKeys seen = seen_keys(s);
        bool begun = false;
        seen.for_each_part(is_few(s) ? CachePlan::KEY_RANGE : SeenKeys::WHOLE, [&](const KeyPart& keys) {
            see(seen.segment(keys.segment), call, unit);
            kernel_.attend(call, unit, &unit.query, first, last, keys.first, keys.last, begun ? part : whole,
                           memory);
            if (begun) kernel_.merge(call, unit, last - first, whole, part);
            begun = true;
        });
        write(s, call, unit, first, last, whole, memory);
    }

    void write(std::int64_t s, AttentionCall<T>& call, AttentionUnit<T>& unit, std::int64_t first,
               std::int64_t last, const AttentionPartial<T>& whole, char* memory) const {
        kernel_.finish(call, unit, first, last, whole, memory);
        if (unit.weights) {
            for (std::int64_t r = first; r < last; ++r) clear_weights(unit, r / group(), r % group());
            // A panel of keys may be of both segments: the sinks come last, as they end where they end.
            const SeenKeys seen = seen_keys(s);
            for (int segment = seen.segments(); segment-- > 0;) {
                see(seen.segment(segment), call, unit);
                kernel_.weights(call, unit, first, last, whole, memory);
            }
        }
        if (first > 0) return;
        for (std::int64_t i = queries(s); i < whole_.call().query_len; ++i) {
            for (std::int64_t head = 0; head < group(); ++head) clear_row(unit, i, head);
        }
    }

    // ---- rows that are no queries

    std::size_t row_bytes(std::int64_t width) const { // of an output
        return static_cast<std::size_t>(width * storage_bytes(whole_.call().out_storage));
    }
    void clear_row(const AttentionUnit<T>& unit, std::int64_t position, std::int64_t head) const {
        const AttentionCall<T>& call = whole_.call();
        std::memset(unit.out + position * call.out_position + head * call.out_head, 0,
                    row_bytes(call.value_dim));
        if (unit.weights) clear_weights(unit, position, head);
        if (!unit.lse) return;
        constexpr T nothing = -std::numeric_limits<T>::infinity();
        std::memcpy(unit.lse + position * call.lse_position + head * call.lse_head, &nothing, sizeof(T));
    }
    void clear_weights(const AttentionUnit<T>& unit, std::int64_t position, std::int64_t head) const {
        const AttentionCall<T>& call = whole_.call();
        std::memset(unit.weights + position * call.weights_position + head * call.weights_head, 0,
                    row_bytes(call.key_len));
    }

    // ---- all at once

    struct Task {
        std::int64_t sequence; // or -1: a part
        std::int64_t head, index;
    };

    // A sequence in parts, for its heads from first_head on.
    struct Split {
        std::int64_t first_head;
        std::vector<PlannedPlace> places;
    };

    std::int64_t run_on(int threads) {
        const std::vector<std::int64_t> order =
            longest_first(sequences_, [&](std::int64_t s) { return seconds_of(s); });
        CachePlan plan(a_.store);
        std::vector<Split> splits(a_.slots.size());
        split(threads, order, plan, splits);
        std::size_t head_bytes = 0;
        for (PlannedPart& part : plan.parts()) {
            part.offset = head_bytes;
            head_bytes += partial_rows(part).bytes();
        }
        // Where all partial results would take too much memory, the heads take turns in it.
        const auto at_a_time =
            static_cast<std::int64_t>(PARTIAL_BYTES / std::max<std::size_t>(head_bytes, 1));
        const std::int64_t heads = std::clamp<std::int64_t>(at_a_time, 1, kv_heads_);
        const CallScratch memory(static_cast<std::size_t>(threads) * own_bytes(),
                                 static_cast<std::size_t>(heads) * head_bytes, threads);
        const auto to_come =
            std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(sequences_ * heads));
        std::vector<Task> tasks;
        for (std::int64_t first = 0; first < kv_heads_; first += heads) {
            const std::int64_t last = std::min(first + heads, kv_heads_);
            tasks.clear();
            list_tasks(order, plan, splits, first, last, tasks);
            for (std::int64_t s = 0; s < sequences_; ++s) {
                const auto parts = std::ssize(splits[static_cast<std::size_t>(s)].places);
                for (std::int64_t h = 0; h < heads; ++h)
                    to_come[static_cast<std::size_t>(s * heads + h)] = parts;
            }
            parallel_for(std::ssize(tasks), threads, [&](std::int64_t index, int thread) {
                const Task& task = tasks[static_cast<std::size_t>(index)];
                char* const own = memory.own() + static_cast<std::size_t>(thread) * own_bytes();
                if (task.sequence >= 0) return compute_block(task.sequence, task.head, task.index, own);
                const PlannedPart& part = plan.parts()[static_cast<std::size_t>(task.index)];
                char* const shared =
                    memory.shared() + static_cast<std::size_t>(task.head - first) * head_bytes;
                compute_part(part, task.head, shared, own);
                for (const std::int64_t s : part.sequences) {
                    auto& left = to_come[static_cast<std::size_t>(s * heads + task.head - first)];
                    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                        merge(s, task.head, plan, splits[static_cast<std::size_t>(s)].places, shared, own);
                }
            });
        }
        return std::ranges::count_if(plan.parts(),
                                     [](const PlannedPart& part) { return part.sequences.size() > 1; });
    }

    std::int64_t rows_of(const PlannedPart& part) const {
        return rows(part.sequences.front()) * std::ssize(part.sequences);
    }

    // In parts are sequences that may share some, and the units that come last.
    void split(int threads, const std::vector<std::int64_t>& order, CachePlan& plan,
               std::vector<Split>& splits) {
        const AttentionArguments& dense = a_.dense;
        const AttentionCall<T>& call = whole_.call();
        const bool may_share = !dense.mask && !dense.addends[0] && !dense.addends[1] && !dense.alibi_slopes &&
                               call.left == INT64_MAX && call.right == INT64_MAX &&
                               a_.store.settings().sliding_window == 0;
        std::int64_t whole_units = sequences_ * kv_heads_ - (threads > 1 ? TAIL * threads : 0);
        for (const std::int64_t s : order) {
            const std::int64_t most_members =
                may_share && is_few(s) && rows(s) > 0 ? std::min(MOST_MEMBERS, kernel_.rows / rows(s)) : 0;
            const bool shares =
                most_members > 1 && length(s) >= CachePlan::KEY_RANGE && a_.store.shared(slot(s), 0);
            const std::int64_t first_head = shares ? 0 : std::clamp<std::int64_t>(whole_units, 0, kv_heads_);
            whole_units -= kv_heads_;
            Split& sequence = splits[static_cast<std::size_t>(s)];
            sequence.first_head = is_few(s) ? first_head : kv_heads_;
            if (sequence.first_head < kv_heads_)
                sequence.places = plan.add(s, slot(s), queries(s), call.causal, call.left, most_members);
        }
    }

    // Of heads [first, last): long tasks first, then the short ones.
    void list_tasks(const std::vector<std::int64_t>& order, const CachePlan& plan,
                    const std::vector<Split>& splits, std::int64_t first, std::int64_t last,
                    std::vector<Task>& tasks) const {
        for (const bool few : {false, true}) {
            for (const std::int64_t s : order) {
                const std::int64_t end = std::min(last, splits[static_cast<std::size_t>(s)].first_head);
                for (std::int64_t h = first; is_few(s) == few && h < end; ++h) {
                    for (std::int64_t b = blocks(s); b-- > 0;) tasks.push_back({s, h, b});
                }
            }
        }
        for (const bool shared : {true, false}) {
            for (std::int64_t h = first; h < last; ++h) {
                for (std::size_t p = 0; p < plan.parts().size(); ++p) {
                    const std::vector<std::int64_t>& members = plan.parts()[p].sequences;
                    if ((members.size() > 1) != shared) continue;
                    if (splits[static_cast<std::size_t>(members.front())].first_head > h) continue;
                    tasks.push_back({-1, h, static_cast<std::int64_t>(p)});
                }
            }
        }
    }

    // A part for all sequences that have it: if they are several, all their rows see all of its keys.
    void compute_part(const PlannedPart& part, std::int64_t h, char* shared, char* memory) const {
        const std::int64_t s = part.sequences.front();
        AttentionCall<T> call = call_of(s);
        AttentionUnit<T> unit = unit_of(s, h);
        see(seen_keys(s).segment(part.keys.segment), call, unit);
        const char* queries[MOST_MEMBERS];
        for (std::size_t i = 0; i < part.sequences.size(); ++i)
            queries[i] = unit_of(part.sequences[i], h).query;
        if (part.sequences.size() > 1) call.causal = false, unit.key_len = part.keys.last;
        kernel_.attend(call, unit, queries, 0, rows_of(part), part.keys.first, part.keys.last,
                       partial_rows(part).at(shared + part.offset), memory);
    }

    // From the first part to the last, whichever ended last: the bits are fixed. The parts of others are left as
    // they are.
    void merge(std::int64_t s, std::int64_t h, const CachePlan& plan, const std::vector<PlannedPlace>& places,
               char* shared, char* memory) const {
        AttentionCall<T> call = call_of(s);
        AttentionUnit<T> unit = unit_of(s, h);
        const auto place = [&](std::size_t i) {
            const PlannedPart& part = plan.parts()[places[i].part];
            return partial_rows(part).at(shared + part.offset, places[i].member * rows(s));
        };
        const AttentionPartial<T> whole = place(0);
        for (std::size_t i = 1; i < places.size(); ++i) kernel_.merge(call, unit, rows(s), whole, place(i));
        write(s, call, unit, 0, rows(s), whole, memory);
    }

    const CacheArguments& a_;
    const Problem<T> whole_;
    const KernelTable& table_ = active_table();
    const CachedKernels<T>& kernel_ = cached_kernels(table_, whole_.call());
    std::int64_t kv_heads_, sequences_;
    std::size_t kernel_bytes_;
    bool exact_sums_;
    PartialLayout<T> own_rows_; // of the partial results of a thread
};

} // namespace

template <class T> std::int64_t cache_attention(const CacheArguments& arguments) {
    return CacheAttention<T>(arguments).run();
}

template std::int64_t cache_attention<float>(const CacheArguments& arguments);
template std::int64_t cache_attention<double>(const CacheArguments& arguments);

} // namespace npattn
