#pragma once
// What one instruction set offers: the kernels of every family, for each type of element, and the sizes they
// work in. Each cpp/kernels/<family>.cpp is compiled once per ISA and exports its part, `<family>_table`, in
// namespace npattn::<isa>; registry.cpp joins the parts (those of another ISA where nothing would differ). Types
// only: this header is read by units with other -m flags.
//
// Strides are in bytes where the name of a pointer's type is char, in elements elsewhere.

#include <cstddef>
#include <cstdint>

#include "core/bfloat16.hpp"

namespace npattn {

// Columns of a packed panel, on every ISA: a matrix (depth, columns) becomes panels [depth][PANEL], zeros
// past the last column. Keys are packed as the columns of (head_dim, key_len), values as (key_len,
// value_dim).
constexpr int PANEL = 32;

[[maybe_unused]] static constexpr std::int64_t panel_count(std::int64_t columns) {
    return (columns + PANEL - 1) / PANEL;
}

// ---- gemm: C = A B ---------------------------------------------------------------------------------------

// Depths of a product are summed from 0 in blocks of this many (of pairs: twice as many depths), and the blocks added
// in order, on every path and ISA; but for tile registers, whose sums go on.
constexpr std::int64_t DEPTH_BLOCK = 256;

enum class Start {
    zero,   // C = A B
    bias,   // C = A B + bias
    add,    // C = C + A B: the next block of depths
    resume, // C = A B, its sums begun from C: the same block of depths, continued
};

// Rows of a left operand are copied this many elements apart, up to DEPTH_BLOCK of them each: not a power of
// two, so that the rows of a tile do not fall into the same cache sets.
constexpr int ROW_STRIDE = DEPTH_BLOCK + 16;
// Rows whose numbers (as integers: whose scale) are at least this, in products with integers, are divided by it, and
// their sums multiplied by it when the scale of the others has been applied.
constexpr float LARGE_SCALE = 0x1p64f;

// Most rows of a left operand that meet the columns of the right one as they lie in memory.
constexpr int MOST_DOT_ROWS = 32;

// What products of P are summed in.
template <class P> struct SumOf { using type = P; };
template <> struct SumOf<HalfPair> { using type = float; };
template <> struct SumOf<Int8Quad> { using type = std::int32_t; };
template <class P> using Sum = typename SumOf<P>::type;

// Operands are copied to P whatever they are stored as: float and double to themselves, the half types to float,
// or bfloat16 to pairs, two depths in one (the last with a 0 where depth is odd).
template <class P, class T = Sum<P>> struct GemmKernels {
    int rows;       // MR: rows of A that one register tile takes; copies of A have room for a multiple of it
    int block_rows; // rows of A that had better be copied at a time: a multiple of MR
    int depth_blocks; // blocks of depth that `multiply` takes at a time

    // Panels `first` to `last` of a matrix (depth, columns) with any strides; panel p is
    // panels[p * panel_stride][depth][PANEL].
    void (*pack_panels)(Storage storage, const char* matrix, std::ptrdiff_t depth_stride,
                        std::ptrdiff_t column_stride, std::int64_t depth, std::int64_t columns,
                        std::int64_t first, std::int64_t last, P* panels, std::ptrdiff_t panel_stride);

    // A (rows, depth), at most DEPTH_BLOCK P a row, with any strides -> copy[row][ROW_STRIDE].
    void (*copy_rows)(Storage storage, const char* matrix, std::ptrdiff_t row_stride,
                      std::ptrdiff_t depth_stride, std::int64_t rows, std::int64_t depth, P* copy);

    // C (rows, columns) from copied rows * panels, `depth` P deep, at most DEPTH_BLOCK or that of `depth_blocks` blocks,
    // rows of A being copied a block after the other, all rows of one before those of the next. Panel p of the operand
    // starts at panels + p * panel_stride, and only its first `columns` columns over all panels count.
    void (*multiply)(const P* a, const P* panels, std::ptrdiff_t panel_stride, std::int64_t rows,
                     std::int64_t depth, std::int64_t columns, Start start, const T* bias, char* c,
                     std::ptrdiff_t c_row_stride);

    // The same with B (depth, columns) as it lies in memory, its rows contiguous: for few rows of A. `depth` are
    // elements of B.
    void (*multiply_direct)(Storage b_storage, const P* a, const char* b, std::ptrdiff_t b_depth_stride,
                            std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                            const T* bias, char* c, std::ptrdiff_t c_row_stride);

    // The same with the columns of B contiguous, `b_column_stride` bytes apart, for at most MOST_DOT_ROWS rows: each
    // lane of a register sums products of its own, which are added up at the end. `depth` may be that of `dot_blocks`
    // blocks (so that no lane sums more than one), copied as above.
    int dot_blocks;
    void (*multiply_dots)(Storage b_storage, const P* a, const char* b, std::ptrdiff_t b_column_stride,
                          std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                          const T* bias, char* c, std::ptrdiff_t c_row_stride);
};
struct GemmTable {
    GemmKernels<float> f32;
    GemmKernels<double> f64;

    // Half precision panels as they are kept, for every ISA alike: panels[p * panel_stride][depth / 2][PANEL] of
    // pairs, from elements of 16 bits.
    void (*pack_pairs)(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                       std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last,
                       HalfPair* panels, std::ptrdiff_t panel_stride);

    // f32.multiply with such panels: a panel is widened, then meets all rows.
    void (*multiply_pairs)(Storage storage, const float* a, const HalfPair* panels,
                           std::ptrdiff_t panel_stride, std::int64_t rows, std::int64_t depth,
                           std::int64_t columns, Start start, const float* bias, char* c,
                           std::ptrdiff_t c_row_stride);

    // Sums (rows, columns), rows `stride` elements apart, rounded to C.
    void (*narrow_rows)(Storage storage, const float* sums, std::ptrdiff_t stride, std::int64_t rows,
                        std::int64_t columns, char* c, std::ptrdiff_t c_row_stride);
};

// ---- int8: float rows times weights of 8 bits, in integers -----------------------------------------------

// Depth up to which the sums of an element, 127 * 255 each, fit in 32 bits.
constexpr std::int64_t INT8_DEPTH = 65536;

struct Int8Table {
    int rows; // as in GemmKernels

    // x (rows, depth), rows contiguous -> quads[block][row][ROW_STRIDE] of DEPTH_BLOCK quads a block, blocks
    // `block_stride` apart, the last quad filled with 0: q = round(x * 127 / max |x|). scales: max |x| / 127, NaN where
    // a row is not finite; sums: of the q of a row.
    void (*quantise_rows)(Storage storage, const char* x, std::ptrdiff_t row_stride, std::int64_t rows,
                          std::int64_t depth, std::ptrdiff_t block_stride, Int8Quad* quads, float* scales,
                          std::int32_t* sums);

    // As GemmKernels::multiply, of one block.
    void (*multiply)(const Int8Quad* a, const Int8Quad* panels, std::ptrdiff_t panel_stride,
                     std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                     const std::int32_t* bias, char* sums, std::ptrdiff_t sums_row_stride);

    // C = (sums - 128 row_sums) * row_scales * column_scales + bias (or null), rounded to its storage.
    void (*scale_rows)(Storage storage, const std::int32_t* sums, std::ptrdiff_t stride, std::int64_t rows,
                       std::int64_t columns, const float* row_scales, const std::int32_t* row_sums,
                       const float* column_scales, const float* bias, char* c, std::ptrdiff_t c_row_stride);
};

// ---- attention -------------------------------------------------------------------------------------------

enum class Write {
    output,
    scores
}; // scores: the scores themselves go to `weights`, nothing else is computed

// One call: what all its (batch, kv head) units share. `position`: stride from one query to the next, `head`:
// from one head of the group to the next.
template <class T> struct AttentionCall {
    Storage query_storage, key_storage, out_storage; // of query; of key and value; of out and weights
    std::int64_t query_len, key_len, head_dim, value_dim;
    std::int64_t group; // query heads that share a key head
    T scale, softcap;   // softcap 0: off
    bool causal;
    std::int64_t left, right; // window; unbounded: the largest int64
    Write write;
    bool (*stop)() noexcept; // true: give up soon, the result is not wanted any more
    std::ptrdiff_t query_position, query_head, key_position, value_position, out_position, out_head;
    std::ptrdiff_t lse_position, lse_head, weights_position, weights_head;
    std::ptrdiff_t mask_position, mask_head, mask_key;
    std::ptrdiff_t addend_position[2], addend_head[2], addend_key[2];
};

// Keys and values of one head in the pages of a cache (ops/page_pool.hpp). Key j and its value lie in page
// j / page_keys: key panels [page_keys / PANEL][head_dim][PANEL] `key` bytes behind the start of the page, values
// [page_keys][value_dim] `value` bytes behind it. Where they are int8, both are quads, and a key is its integers times
// its scale, one of [page_keys] floats `key_scale` bytes behind the start of the page; so is a value.
struct CachePages {
    const char* const* pages; // null where nothing sees a page; itself null: there are none
    std::int64_t page_keys;
    std::ptrdiff_t key, value, key_scale, value_scale;
};

// One (batch, kv head): pointers to its first element, of the group's first head. Null where there is
// nothing.
template <class T> struct AttentionUnit {
    const char *query, *key, *value;
    char *out, *lse, *weights;
    const char* mask;        // bool: not 0 = attend
    const char* addends[2];  // T: float mask, bias
    const T *sinks, *slopes; // one a head
    std::int64_t key_first;  // keys before it are hidden
    std::int64_t key_len;    // keys at or past it are never read
    std::int64_t query_offset;
    CachePages cache;                      // in place of key and value
    const void *key_panels, *value_panels; // of the whole unit, or null
    const AttentionUnit* next;             // will come soon: is to be in the cache then; or null
};

// The unfinished result of some rows over some keys: softmax state in the units of the scores times `factor`.
template <class T> struct AttentionPartial {
    T *maximum, *sum, *output; // (rows), (rows), (rows, padded value_dim)
    T* exact_sum; // (rows): where the weights are rounded, the sum of those that are not; null if nobody asks
};

template <class T> struct AttentionKernels {
    int rows; // packed rows of one task where panels wait: row = query position * group + head of the group
    int together; // elements of a depth that lie in one T of the panels: 2 where they are pairs

    // Of a task of so many rows.
    std::size_t (*scratch_bytes)(const AttentionCall<T>& call, std::int64_t rows);

    // Keys [first, last) of a unit and their values into its panels; first is a multiple of 2 PANEL.
    void (*pack)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                 std::int64_t last);

    // Rows [first, last) of a unit over all its keys.
    void (*attend)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                   std::int64_t last, void* scratch);
};
struct AttentionTable {
    AttentionKernels<float> f32;
    AttentionKernels<double> f64;
};

// ---- decode: few rows, keys and values as they lie in memory ---------------------------------------------

template <class T> struct DecodeKernels {
    std::size_t (*scratch_bytes)(const AttentionCall<T>& call);

    // All rows of a unit over its keys [first, last), into a partial result.
    void (*attend)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                   std::int64_t last, const AttentionPartial<T>& partial, void* scratch);

    // `part` merged into `into`; in a fixed order, the bits are fixed.
    void (*merge)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const AttentionPartial<T>& into,
                  const AttentionPartial<T>& part);

    // Writes out all rows of a unit from the partial result over all its keys.
    void (*finish)(const AttentionCall<T>& call, const AttentionUnit<T>& unit,
                   const AttentionPartial<T>& whole, void* scratch);
};
struct DecodeTable {
    DecodeKernels<float> f32;
    DecodeKernels<double> f64;
};

// ---- cached: keys and values in the pages of a cache -----------------------------------------------------

template <class T> struct CachedKernels {
    int rows; // most packed rows of a task

    std::size_t (*scratch_bytes)(const AttentionCall<T>& call);

    // Rows [first, last) over keys [key_first, key_last), a multiple of 256 or before any key that is seen, into
    // a partial result. The rows may be those of several units, one behind the other, that see the same keys:
    // queries[i] is the query of unit i.
    void (*attend)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const char* const* queries,
                   std::int64_t first, std::int64_t last, std::int64_t key_first, std::int64_t key_last,
                   const AttentionPartial<T>& partial, void* scratch);

    // `part` merged into `into`; in a fixed order, the bits are fixed.
    void (*merge)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t rows,
                  const AttentionPartial<T>& into, const AttentionPartial<T>& part);

    // Output and lse of rows [first, last) from the partial result over all their keys.
    void (*finish)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                   std::int64_t last, const AttentionPartial<T>& whole, void* scratch);

    // And their weights, which are 0 before.
    void (*weights)(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                    std::int64_t last, const AttentionPartial<T>& whole, void* scratch);
};
struct CachedTable {
    CachedKernels<float> f32;
    CachedKernels<double> f64;
};

// ---- softmax ---------------------------------------------------------------------------------------------

// Rows that are contiguous each, at any alignment: row r starts at data + r * stride. Null data: there is
// none.
struct ConstRows {
    const char* data;
    std::ptrdiff_t stride;
};
struct Rows {
    char* data;
    std::ptrdiff_t stride;
};

// A row may come in pieces, each a multiple of SUM_PIECE long but the last: its maximum and sum are carried
// on.
constexpr std::int64_t SUM_PIECE = 1024;

// x and y are stored as S, the rest is T.
template <class S, class T = Compute<S>> struct SoftmaxKernels {
    // maximum[r] = the largest of maximum[r] and the visible elements of x (rows, columns); NaN is skipped.
    // mask: bytes, not 0 = visible.
    void (*maximum)(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns, T* maximum);

    // e = exp(x - maximum), 0 where hidden; not kept where e is null. It may be x itself, or of a wider type with both
    // ending at the same place.
    // sum[r] + correction[r] grows by the sum of row r: inf where maximum[r] is inf, NaN where the row has a
    // NaN.
    void (*exponentials)(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns,
                         const T* maximum, Rows e, T* sum, T* correction);

    // y = e * factor[r], 0 where hidden; y may begin where e does.
    void (*scale)(ConstRows e, ConstRows mask, std::int64_t rows, std::int64_t columns, const T* factor,
                  Rows y);

    // y = (x - maximum[r]) - log_sum[r]; y may be x itself.
    void (*shift)(ConstRows x, std::int64_t rows, std::int64_t columns, const T* maximum, const T* log_sum,
                  Rows y);
};
struct SoftmaxTable {
    SoftmaxKernels<float> f32;
    SoftmaxKernels<double> f64;
    SoftmaxKernels<Float16> f16;
    SoftmaxKernels<BFloat16> bf16;
};

// ---- rope ------------------------------------------------------------------------------------------------

// x and y are stored as S, cos and sin are T.
template <class S, class T = Compute<S>> struct RopeKernels {
    // (a, b) -> (a cos - b sign sin, b cos + a sign sin) for each of the first `pairs` pairs of x (rows, 2
    // pairs + rest); the rest is copied. Pairs are (x_i, x_{i + pairs}) or, interleaved, (x_{2i}, x_{2i +
    // 1}). y may be x itself.
    void (*rotate)(ConstRows x, ConstRows cos, ConstRows sin, std::int64_t rows, std::int64_t pairs,
                   std::int64_t rest, bool interleaved, T sign, Rows y);
};
struct RopeTable {
    RopeKernels<float> f32;
    RopeKernels<double> f64;
    RopeKernels<Float16> f16;
    RopeKernels<BFloat16> bf16;
};

// ---- heads -----------------------------------------------------------------------------------------------

struct HeadsTable {
    // destination[r][c] = source[r][c] for items of 1, 2, 4, 8 or 16 bytes, any strides, bit for bit; they do
    // not overlap. stream: contiguous rows are written past the cache.
    void (*copy)(const char* source, std::ptrdiff_t source_row, std::ptrdiff_t source_column,
                 char* destination, std::ptrdiff_t destination_row, std::ptrdiff_t destination_column,
                 std::int64_t rows, std::int64_t columns, int item_bytes, bool stream);
    // The same of contiguous rows of floats to rows of a half type, each number rounded (store_as).
    void (*narrow)(Storage storage, const char* source, std::ptrdiff_t source_row, char* destination,
                   std::ptrdiff_t destination_row, std::int64_t rows, std::int64_t columns);
    // Finite floats among them become infinite so.
    bool (*overflows)(Storage storage, const char* source, std::ptrdiff_t source_row, std::int64_t rows,
                      std::int64_t columns);
};

// ---- ceiling: what the machine can do, for benchmarks ----------------------------------------------------

template <class T> struct CeilingKernels {
    int step_operations; // floating-point operations of one step, a multiply-add counted as two
    T (*multiply_add)(std::int64_t steps, T factor, T term);
};
struct CeilingTable {
    CeilingKernels<float> f32;
    CeilingKernels<double> f64;
    float (*read_sum)(const char* data, std::int64_t bytes);
};

// ---- dot: what multiplies bfloat16 as it is, on the ISAs that can ----------------------------------------

struct DotTable {
    GemmKernels<HalfPair> gemm;
    CeilingKernels<float> ceiling; // factor and term are rounded to bfloat16
};

// -----------------------------------------------------------------------------------------------------------------

// One bit a CPU feature.
enum Feature : std::uint64_t {
    FEATURE_AVX2 = 1,   // with FMA and F16C
    FEATURE_AVX512 = 2, // F, CD, BW, DQ, VL
    FEATURE_NEON = 4,
    FEATURE_AVX512_BF16 = 8,
    FEATURE_AVX512_VNNI = 16,
    FEATURE_AMX = 32, // TILE, BF16, INT8
};

struct KernelTable {
    const char* name;
    std::uint64_t needs; // Feature bits
    const GemmTable* gemm;
    const AttentionTable* attention;
    const DecodeTable* decode;
    const CachedTable* cached;
    const SoftmaxTable* softmax;
    const RopeTable* rope;
    const HeadsTable* heads;
    const CeilingTable* ceiling;
    const Int8Table* int8;
    // Of bfloat16 as it is; null: it is widened.
    const DotTable* dot = nullptr;
    const AttentionKernels<float>* attention_pairs = nullptr;
    const CachedKernels<float>* cached_pairs = nullptr;
};

} // namespace npattn
