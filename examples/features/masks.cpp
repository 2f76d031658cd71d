// Masks: causal from either corner, and windows.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask causal --mode gm0 --features plain
#include "plain.h"

void example() {
  using namespace plain;
  using jitfmha::Mask;
  constexpr std::int64_t kQueries = 40, kKeys = 90;
  const Tensor q = random(1, kQueries, 2, 64), k = random(1, kKeys, 2, 64);
  const Tensor v = random(1, kKeys, 2, 64), out = ones(1, kQueries, 2, 64);
  // The diagonal begins at the first key, or ends at the last one.
  constexpr std::int64_t kTopLeft = 0, kBottomRight = kKeys - kQueries;
  const struct {
    const char* name;
    Mask mask;
    std::int64_t left, right;  // of the diagonal; -1: all keys
    std::int64_t diagonal;
  } cases[] = {
      {"causal, from the top left", Mask::causal_top_left, -1, 0, kTopLeft},
      {"causal, to the bottom right", Mask::causal_bottom_right, -1, 0, kBottomRight},
      {"16 keys back, none ahead", Mask::window_bottom_right, 16, 0, kBottomRight},
      {"5 back, 7 ahead", Mask::window_bottom_right, 5, 7, kBottomRight},
      {"all back, 3 ahead", Mask::window_top_left, -1, 3, kTopLeft},
  };
  for (const auto& each : cases) {
    jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
    args.mask = each.mask;
    args.window_left = each.left, args.window_right = each.right;  // read of windows alone
    run(args);
    Changes changes;
    changes.score = [&](Place at, double score) {
      const std::int64_t ahead = at.j - at.i - each.diagonal;
      const bool is_seen =
          (each.left < 0 || ahead >= -each.left) && (each.right < 0 || ahead <= each.right);
      return is_seen ? score : -HUGE_VAL;
    };
    compare(each.name, out.read(), attention(q, k, v, changes));
  }
}
