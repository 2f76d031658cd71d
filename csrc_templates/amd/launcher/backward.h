// What backward kernels of ours have in common: each has tiles of rows of queries or of keys, and
// the heads that these belong to.
#pragma once

#include "attention_arguments.h"
#include "runtime.h"

namespace {

// Starts the kernels of a pass, one after the other; `arguments_of` makes those of one. A line is a
// sequence and head. Workgroups along x go to the XCDs in turn, each of which has an L2 cache of
// its own: so every XCD, or every few of them together, has as many lines as the others.
template <class ArgumentsOf>
int start_pass(const BackwardPass& pass, std::int64_t seqlen_q, std::int64_t seqlen_k, void* stream,
               const ArgumentsOf& arguments_of) {
  constexpr std::int64_t kMostAlongAxis = 65535;
  for (std::int64_t i = 0; i < pass.kernel_count; ++i) {
    const LaunchedBackwardKernel& launched = pass.kernels[i];
    const Kernel& kernel = *static_cast<const Kernel*>(launched.call.kernel);
    const std::int64_t batch = launched.call.batch, lines = batch * launched.heads;
    const std::int64_t tiles =
        divided_up(launched.has_rows_of_keys ? seqlen_k : seqlen_q, launched.rows);
    if (lines * tiles == 0) continue;
    const std::int64_t xcds = common_divisor(lines, kernel.xcds), xcd_lines = lines / xcds;
    const std::int64_t workgroups = tiles * launched.slices;
    if (workgroups > kMostAlongAxis || xcd_lines > kMostAlongAxis)
      return failed(
          kUnusable,
          "a backward pass of %lld sequences and %lld heads, with %lld workgroups for the "
          "longest sequence, takes a grid of more than 65535 workgroups along an axis",
          static_cast<long long>(batch), static_cast<long long>(launched.heads),
          static_cast<long long>(workgroups));
    auto args = arguments_of(launched.call);
    args.line_heads = divisor(launched.heads);
    args.xcd_lines = number(xcd_lines);
    args.tiles = number(tiles);
    if (const int status = launch(kernel, {xcds, workgroups, xcd_lines}, stream, args))
      return status;
  }
  return kSuccess;
}

}  // namespace
