#pragma once
// A call as the kernels see it.

#include <cstring>
#include <optional>

#include "core/parallel.hpp"
#include "dispatch/kernel_table.hpp"
#include "ops/attention.hpp"

namespace npattn {

// What all units of a dense call share, and the way from a unit's number, batch * kv heads + kv head, to its
// pointers.
template <class T> class Problem {
public:
    explicit Problem(const AttentionArguments& a) : a_(a), leading_(a.query.dimensions - 3) {
        heads_ = a.query.size(-3);
        kv_heads_ = a.key.size(-3);
        units_ = a.query.count(leading_) * kv_heads_;
        call_.query_storage = a.query_storage;
        call_.key_storage = a.key_storage;
        call_.out_storage = a.out_storage;
        call_.query_len = a.query.size(-2);
        call_.key_len = a.key.size(-2);
        call_.head_dim = a.query.size(-1);
        call_.value_dim = a.value.size(-1);
        call_.group = kv_heads_ == 0 ? 1 : heads_ / kv_heads_;
        call_.scale = static_cast<T>(a.scale);
        call_.softcap = static_cast<T>(a.softcap);
        call_.causal = a.causal;
        call_.left = a.left;
        call_.right = a.right;
        call_.write = a.want_scores ? Write::scores : Write::output;
        call_.stop = stop_requested;
        call_.query_position = a.query.stride(-2);
        call_.query_head = a.query.stride(-3);
        call_.key_position = a.key.stride(-2);
        call_.value_position = a.value.stride(-2);
        if (a.out) call_.out_position = a.out->stride(-2), call_.out_head = a.out->stride(-3);
        if (a.lse) call_.lse_position = a.lse->stride(-1), call_.lse_head = a.lse->stride(-2);
        if (a.weights)
            call_.weights_position = a.weights->stride(-2), call_.weights_head = a.weights->stride(-3);
        if (a.mask) {
            call_.mask_position = a.mask->stride(-2);
            call_.mask_head = a.mask->stride(-3);
            call_.mask_key = a.mask->stride(-1);
        }
        for (int i = 0; i < 2; ++i) {
            if (!a.addends[i]) continue;
            call_.addend_position[i] = a.addends[i]->stride(-2);
            call_.addend_head[i] = a.addends[i]->stride(-3);
            call_.addend_key[i] = a.addends[i]->stride(-1);
        }
    }

    AttentionUnit<T> unit(std::int64_t number) const {
        const std::int64_t batch = number / kv_heads_;
        const std::int64_t kv_head = number % kv_heads_;
        const std::int64_t head = kv_head * call_.group;
        const auto at = [&](const TensorView& t, std::int64_t h, int head_axis) {
            return t.data + t.offset(batch, leading_) + h * t.stride(head_axis);
        };
        const auto maybe_at = [&](const std::optional<TensorView>& t, int head_axis) -> char* {
            return t ? at(*t, head, head_axis) : nullptr;
        };
        AttentionUnit<T> u = {};
        u.query = at(a_.query, head, -3);
        u.key = at(a_.key, kv_head, -3);
        u.value = at(a_.value, kv_head, -3);
        u.out = maybe_at(a_.out, -3);
        u.lse = maybe_at(a_.lse, -2);
        u.weights = maybe_at(a_.weights, -3);
        u.mask = maybe_at(a_.mask, -3);
        u.addends[0] = maybe_at(a_.addends[0], -3);
        u.addends[1] = maybe_at(a_.addends[1], -3);
        u.slopes = reinterpret_cast<const T*>(maybe_at(a_.alibi_slopes, -1));
        if (a_.sinks) u.sinks = reinterpret_cast<const T*>(a_.sinks->data) + head;
        u.key_len = integer(a_.kv_lengths, batch, call_.key_len);
        u.query_offset = integer(a_.query_offset, batch, 0);
        return u;
    }

    const AttentionCall<T>& call(std::int64_t = 0) const { return call_; } // the same for every unit

    // As attention_plan.hpp asks for.
    template <class Body> void for_each(Body&& body) const {
        if (units_ > 0 && call_.query_len > 0) body(call_, 0, units_);
    }

private:
    std::int64_t integer(const std::optional<TensorView>& values, std::int64_t batch,
                         std::int64_t otherwise) const {
        if (!values) return otherwise;
        std::int64_t value;
        std::memcpy(&value, values->data + values->offset(batch, leading_), sizeof value);
        return value;
    }

    const AttentionArguments& a_;
    AttentionCall<T> call_ = {};
    int leading_;
    std::int64_t heads_, kv_heads_, units_;
};

} // namespace npattn
