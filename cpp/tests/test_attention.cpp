// Whole attention on every ISA that this CPU has, against plain loops in double. Every array ends where
// memory ends, and keys that nothing sees are NaN.

#include "ops/attention.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "check.hpp"
#include "dispatch/registry.hpp"
#include "guard_page.hpp"

namespace npattn {
namespace {

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr std::int64_t UNBOUNDED = std::numeric_limits<std::int64_t>::max();

struct Case {
    const char* name;
    std::int64_t query_len, key_len, head_dim = 16, value_dim = 16, kv_heads = 2, group = 1;
    bool causal = false;
    std::int64_t offset = 0, left = UNBOUNDED, right = UNBOUNDED;
    bool mask = false, float_mask = false, bias = false, lengths = false, sinks = false, slopes = false;
    double softcap = 0, scale = 0.3;
};

// Both paths (few and many rows), widths that are no multiple of a register, and each option by itself and
// with others.
const Case cases[] = {
    {.name = "one query", .query_len = 1, .key_len = 77},
    {.name = "one query of a group",
     .query_len = 1,
     .key_len = 300,
     .head_dim = 33,
     .value_dim = 17,
     .group = 4},
    {.name = "long decode", .query_len = 2, .key_len = 5000, .kv_heads = 1, .causal = true, .offset = 4998},
    {.name = "square", .query_len = 40, .key_len = 40},
    {.name = "one key", .query_len = 30, .key_len = 1, .head_dim = 1, .value_dim = 1},
    {.name = "odd", .query_len = 37, .key_len = 301, .head_dim = 19, .value_dim = 5, .group = 3},
    {.name = "wide", .query_len = 25, .key_len = 130, .head_dim = 128, .value_dim = 72, .group = 2},
    {.name = "causal", .query_len = 150, .key_len = 150, .head_dim = 8, .group = 2, .causal = true},
    {.name = "causal, lower right", .query_len = 20, .key_len = 290, .causal = true, .offset = 270},
    {.name = "rows that see nothing", .query_len = 50, .key_len = 30, .causal = true, .offset = -20},
    {.name = "window", .query_len = 200, .key_len = 200, .left = 17, .right = 3},
    {.name = "mask", .query_len = 45, .key_len = 140, .mask = true},
    {.name = "float mask", .query_len = 45, .key_len = 140, .float_mask = true},
    {.name = "mask, few rows",
     .query_len = 3,
     .key_len = 140,
     .mask = true,
     .float_mask = true,
     .bias = true},
    {.name = "lengths", .query_len = 33, .key_len = 99, .lengths = true},
    {.name = "lengths, few rows", .query_len = 1, .key_len = 99, .lengths = true, .sinks = true},
    {.name = "sinks, softcap", .query_len = 33, .key_len = 99, .sinks = true, .softcap = 1.5},
    {.name = "slopes", .query_len = 33, .key_len = 99, .offset = 66, .slopes = true, .scale = -0.2},
    {.name = "all",
     .query_len = 70,
     .key_len = 90,
     .head_dim = 20,
     .value_dim = 9,
     .group = 2,
     .causal = true,
     .offset = 20,
     .left = 60,
     .mask = true,
     .float_mask = true,
     .bias = true,
     .lengths = true,
     .sinks = true,
     .slopes = true,
     .softcap = 4},
};

constexpr std::int64_t BATCH = 2;

// An array whose last element is the last that can be touched.
template <class T> class Array {
public:
    explicit Array(std::initializer_list<std::int64_t> shape)
        : view_{}, page_(std::make_unique<GuardPage>(bytes(shape))) {
        for (std::int64_t size : shape) view_.shape[view_.dimensions++] = size;
        std::ptrdiff_t stride = sizeof(T);
        for (int i = view_.dimensions - 1; i >= 0; --i) {
            view_.strides[i] = stride;
            stride *= view_.shape[i];
        }
        view_.data = page_->end() - stride;
    }
    Array(std::initializer_list<std::int64_t> shape, Random& random) : Array(shape) {
        for (std::int64_t i = 0; i < view_.count(view_.dimensions); ++i)
            data()[i] = static_cast<T>(random.between(-1, 1));
    }
    template <class... Index> T& operator()(Index... index) const {
        const std::int64_t indices[] = {index...};
        std::ptrdiff_t offset = 0;
        for (std::size_t i = 0; i < sizeof...(index); ++i) offset += indices[i] * view_.strides[i];
        return *reinterpret_cast<T*>(view_.data + offset);
    }
    T* data() const { return reinterpret_cast<T*>(view_.data); }
    const TensorView& view() const { return view_; }

    // The same for all heads: an axis 1 of `heads` with stride 0.
    void broadcast_heads(std::int64_t heads) {
        view_.shape[1] = heads;
        view_.strides[1] = 0;
    }

private:
    static std::size_t bytes(std::initializer_list<std::int64_t> shape) {
        std::size_t product = sizeof(T);
        for (std::int64_t size : shape) product *= static_cast<std::size_t>(size);
        return product;
    }
    TensorView view_;
    std::unique_ptr<GuardPage> page_;
};

template <class T> struct Inputs {
    Inputs(const Case& c, Random& random)
        : query({BATCH, c.kv_heads * c.group, c.query_len, c.head_dim}, random),
          key({BATCH, c.kv_heads, c.key_len, c.head_dim}, random),
          value({BATCH, c.kv_heads, c.key_len, c.value_dim}, random),
          mask({BATCH, 1, c.query_len, c.key_len}), float_mask({BATCH, 1, c.query_len, c.key_len}, random),
          bias({BATCH, c.kv_heads * c.group, c.query_len, c.key_len}, random), lengths({BATCH}),
          offsets({BATCH}), sinks({c.kv_heads * c.group}, random),
          slopes({BATCH, c.kv_heads * c.group}, random) {
        const std::int64_t hidden = c.key_len / 2; // by the mask, everywhere
        for (std::int64_t b = 0; b < BATCH; ++b) {
            lengths(b) = b == 0 ? c.key_len - c.key_len / 3 : 0;
            offsets(b) = c.offset;
            for (std::int64_t i = 0; i < c.query_len; ++i) {
                for (std::int64_t j = 0; j < c.key_len; ++j) {
                    mask(b, std::int64_t{0}, i, j) = j != hidden && i != 2 && random.uniform() < 0.6;
                    if (random.uniform() < 0.3) float_mask(b, std::int64_t{0}, i, j) = static_cast<T>(-INF);
                }
            }
            for (std::int64_t h = 0; h < c.kv_heads; ++h) {
                for (std::int64_t j = 0; j < c.key_len; ++j) {
                    if (!(c.mask && j == hidden) && !(c.lengths && j >= lengths(b))) continue;
                    for (std::int64_t e = 0; e < c.head_dim; ++e) key(b, h, j, e) = static_cast<T>(NAN);
                    for (std::int64_t e = 0; e < c.value_dim; ++e) value(b, h, j, e) = static_cast<T>(NAN);
                }
            }
        }
        mask.broadcast_heads(c.kv_heads * c.group);
        float_mask.broadcast_heads(c.kv_heads * c.group);
    }
    Array<T> query, key, value;
    Array<std::uint8_t> mask;
    Array<T> float_mask, bias;
    Array<std::int64_t> lengths, offsets;
    Array<T> sinks, slopes;
};

// The score of (b, h, i, j), -INF where hidden.
template <class T>
double plain_score(const Case& c, const Inputs<T>& in, std::int64_t b, std::int64_t h, std::int64_t i,
                   std::int64_t j) {
    const std::int64_t distance = j - (i + c.offset);
    const bool hidden = (c.causal && distance > 0) || (c.right != UNBOUNDED && distance > c.right) ||
                        (c.left != UNBOUNDED && -distance > c.left) || (c.lengths && j >= in.lengths(b)) ||
                        (c.mask && !in.mask(b, h, i, j));
    if (hidden) return -INF;
    double score = 0;
    for (std::int64_t e = 0; e < c.head_dim; ++e)
        score += double(in.query(b, h, i, e)) * double(in.key(b, h / c.group, j, e));
    score *= c.scale;
    if (c.softcap != 0) score = c.softcap * std::tanh(score / c.softcap);
    if (c.float_mask) score += double(in.float_mask(b, h, i, j));
    if (c.bias) score += double(in.bias(b, h, i, j));
    if (c.slopes) score -= double(in.slopes(b, h)) * std::fabs(double(distance));
    return score;
}

// Output (value_dim) and log-sum-exp of one row.
template <class T>
double plain_row(const Case& c, const Inputs<T>& in, std::int64_t b, std::int64_t h, std::int64_t i,
                 std::vector<double>& output) {
    std::vector<double> scores;
    double largest = c.sinks ? double(in.sinks(h)) : -INF;
    for (std::int64_t j = 0; j < c.key_len; ++j) {
        scores.push_back(plain_score(c, in, b, h, i, j));
        largest = std::fmax(largest, scores.back());
    }
    output.assign(static_cast<std::size_t>(c.value_dim), 0);
    if (largest == -INF) return -INF;
    double sum = c.sinks ? std::exp(double(in.sinks(h)) - largest) : 0;
    for (std::int64_t j = 0; j < c.key_len; ++j) {
        if (scores[static_cast<std::size_t>(j)] == -INF) continue;
        const double weight = std::exp(scores[static_cast<std::size_t>(j)] - largest);
        sum += weight;
        for (std::int64_t e = 0; e < c.value_dim; ++e) {
            output[static_cast<std::size_t>(e)] += weight * double(in.value(b, h / c.group, j, e));
        }
    }
    for (double& x : output) x /= sum;
    return largest + std::log(sum);
}

template <class T> void test_case(const char* isa, const Case& c) {
    Random random(5);
    const Inputs<T> in(c, random);
    const std::int64_t heads = c.kv_heads * c.group;
    const Array<T> out({BATCH, heads, c.query_len, c.value_dim}), lse({BATCH, heads, c.query_len});
    AttentionArguments arguments;
    arguments.query_storage = arguments.key_storage = arguments.out_storage = STORAGE<T>;
    arguments.query = in.query.view();
    arguments.key = in.key.view();
    arguments.value = in.value.view();
    arguments.out = out.view();
    arguments.lse = lse.view();
    if (c.mask) arguments.mask = in.mask.view();
    if (c.float_mask) arguments.addends[0] = in.float_mask.view();
    if (c.bias) arguments.addends[1] = in.bias.view();
    if (c.sinks) arguments.sinks = in.sinks.view();
    if (c.slopes) arguments.alibi_slopes = in.slopes.view();
    if (c.lengths) arguments.kv_lengths = in.lengths.view();
    arguments.query_offset = in.offsets.view();
    arguments.causal = c.causal;
    arguments.left = c.left;
    arguments.right = c.right;
    arguments.scale = c.scale;
    arguments.softcap = c.softcap;
    arguments.threads = 2;
    attention<T>(arguments);

    const double bound = sizeof(T) == 4 ? 4e-6 : 1e-14;
    std::vector<double> wanted;
    double worst = 0;
    for (std::int64_t b = 0; b < BATCH; ++b) {
        for (std::int64_t h = 0; h < heads; ++h) {
            for (std::int64_t i = 0; i < c.query_len; ++i) {
                const double wanted_lse = plain_row(c, in, b, h, i, wanted);
                const double got_lse = double(lse(b, h, i));
                const bool same = got_lse == wanted_lse ||
                                  std::fabs(got_lse - wanted_lse) <= bound * (2 + std::fabs(wanted_lse));
                CHECK(same, "%s, %s, lse(%d, %d, %d) = %.9g, not %.9g", isa, c.name, int(b), int(h), int(i),
                      got_lse, wanted_lse);
                for (std::int64_t e = 0; e < c.value_dim; ++e) {
                    const double error =
                        std::fabs(double(out(b, h, i, e)) - wanted[static_cast<std::size_t>(e)]);
                    if (!(error <= worst) && worst == worst) worst = error; // a NaN stays
                }
            }
        }
    }
    CHECK(worst <= bound, "%s, %s, %s: output off by %g", isa, sizeof(T) == 4 ? "float" : "double", c.name,
          worst);
}

} // namespace
} // namespace npattn

int main() {
    for (const npattn::KernelTable* table : npattn::available_tables()) {
        std::printf("%s\n", table->name);
        npattn::use_table(table->name);
        for (const npattn::Case& c : npattn::cases) {
            npattn::test_case<float>(table->name, c);
            npattn::test_case<double>(table->name, c);
        }
    }
    return npattn::verdict();
}
