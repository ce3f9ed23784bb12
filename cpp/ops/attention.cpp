#include "ops/attention.hpp"

#include "ops/attention_problem.hpp"
#include "ops/attention_region.hpp"

namespace npattn {

template <class T> void attention(const AttentionArguments& arguments) {
    const Problem<T> problem(arguments);
    AttentionRegion<T, Problem<T>>(problem, arguments.threads).run();
}

template void attention<float>(const AttentionArguments& arguments);
template void attention<double>(const AttentionArguments& arguments);

} // namespace npattn
