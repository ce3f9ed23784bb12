#include "ops/varlen.hpp"

#include <vector>

#include "ops/attention_problem.hpp"
#include "ops/attention_region.hpp"

namespace npattn {
namespace {

// A source of units: unit = sequence * kv heads + kv head. Each is what it would be were its sequence alone.
template <class T> class Sequences {
public:
    explicit Sequences(const VarlenArguments& a)
        : a_(a), whole_(a.packed), kv_heads_(a.packed.key.size(-3)),
          order_(longest_first(a.sequences, [&](std::int64_t s) { return unit_seconds(call_of(s)); })) {}

    AttentionCall<T> call(std::int64_t number) const { return call_of(number / kv_heads_); }

    AttentionUnit<T> unit(std::int64_t number) const {
        const std::int64_t sequence = number / kv_heads_;
        const std::int64_t kv_head = number % kv_heads_;
        const AttentionCall<T>& call = whole_.call();
        const std::int64_t query = a_.query_starts[sequence];
        const std::int64_t key = a_.key_starts[sequence];
        AttentionUnit<T> u = whole_.unit(kv_head);
        u.query += query * call.query_position;
        u.key += key * call.key_position;
        u.value += key * call.value_position;
        if (u.out) u.out += query * call.out_position;
        if (u.lse) u.lse += query * call.lse_position;
        if (a_.alibi_slopes) {
            u.slopes =
                reinterpret_cast<const T*>(a_.alibi_slopes->data + sequence * a_.alibi_slopes->stride(0)) +
                kv_head * call.group;
        }
        u.key_len = a_.key_starts[sequence + 1] - key;
        u.query_offset = a_.query_offset ? a_.query_offset[sequence] : 0;
        return u;
    }

    template <class Body> void for_each(Body&& body) const {
        for (const std::int64_t sequence : order_) {
            const AttentionCall<T> call = call_of(sequence);
            if (call.query_len > 0 && kv_heads_ > 0) body(call, sequence * kv_heads_, kv_heads_);
        }
    }

private:
    AttentionCall<T> call_of(std::int64_t sequence) const {
        AttentionCall<T> call = whole_.call();
        call.query_len = a_.query_starts[sequence + 1] - a_.query_starts[sequence];
        call.key_len = a_.key_starts[sequence + 1] - a_.key_starts[sequence];
        return call;
    }

    const VarlenArguments& a_;
    const Problem<T> whole_; // all tokens as one sequence
    std::int64_t kv_heads_;
    std::vector<std::int64_t> order_; // of the sequences: longest first
};

} // namespace

template <class T> void varlen_attention(const VarlenArguments& arguments) {
    const Sequences<T> sequences(arguments);
    AttentionRegion<T, Sequences<T>>(sequences, arguments.packed.threads).run();
}

template void varlen_attention<float>(const VarlenArguments& arguments);
template void varlen_attention<double>(const VarlenArguments& arguments);

} // namespace npattn
