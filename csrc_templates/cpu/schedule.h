// Distribution over threads: items of work, taken in their order by whichever thread is free.
#pragma once

#include "problem.h"
#include "threads.h"

namespace {

// The part of the keys of a query tile that an item of work takes: part `index` of `count`, each of
// `keys` keys in whole tiles. Item `first_item` does the first part, and the items behind it do the
// others.
struct KeySplit {
  int64_t index, count, keys, first_item;
};

// Key tiles of so many keys, of which a part has the least, but where num_splits asks for less.
struct KeyTiles {
  int64_t keys, least;
};

// How the keys of a query tile may be split.
struct SplitRules {
  int64_t num_splits;        // that are asked for; 0 leaves the choice
  int64_t wanted_items;      // where it is left
  KeyTiles of_many, of_few;  // rows of a head
  int64_t few_rows;          // heads with so many rows may be done together,
  int64_t rows_of_heads;     // as long as there are not more rows than these
};

// All query tiles of a problem, numbered sequence by sequence and within one head by head, or some
// heads side by side, the last tile first: under a causal mask it is the heaviest. gm1 takes the
// sequences with the most keys first. Where keys are split, each part of a tile has a number.
class QueryTiles {
 public:
  // A tile and its sequence: the `turn`-th of `turns` of its head, before which there are
  // `heads_before` heads.
  struct Tile {
    Sequence seq;
    int64_t kv_head, heads;  // heads from kv_head on, more than one only of few rows
    int64_t first_row;
    int rows;
    int64_t heads_before, turn, turns;
    KeySplit split;
  };

  // Tiles have at most `most_rows` rows. They are smaller where there would be fewer of them than
  // `wanted_tiles`, if only for the sake of balance.
  QueryTiles(const Problem& problem, int most_rows, int64_t wanted_tiles)
      : problem_(problem),
        most_rows_(most_rows),
        tile_rows_(most_rows),
        narrow_rows_(most_rows),
        wanted_tiles_(wanted_tiles) {}

  // It is called once, before all else, and returns false when there is not enough memory.
  bool plan() {
    const FmhaShape& s = problem_.shape;
    int64_t rows = 0;
    if (kMode == Mode::gm0) {
      rows = s.batch * s.heads_q * s.seqlen_q;
      multiplications_ = rows * s.seqlen_k * (kHdimQ + kHdimV);
    } else {
      for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t added = problem_.seqlen_q(b) * s.heads_q;
        rows += added;
        multiplications_ += added * problem_.seqlen_k(b) * (kHdimQ + kHdimV);
      }
    }
    if (rows == 0) return true;

    // Chosen by the shape alone, not by the number of threads.
    tile_rows_ = narrow_rows_ =
        round_up(int(min<int64_t>(rows / wanted_tiles_, most_rows_ - 1) + 1), kPanelLanes);
    if (kMode == Mode::gm0) {
      // As many tiles of a head, but equally many rows in each.
      const int64_t of_head = s.seqlen_q * problem_.group_size();
      const int64_t of_tile = (of_head + tiles_of_head(0) - 1) / tiles_of_head(0);
      tile_rows_ = narrow_rows_ = round_up(int(of_tile), kPanelLanes);
      number_items();
      return true;
    }

    members_ = thread_array<Member>(s.batch);
    if (!members_) return false;
    for (int64_t b = 0; b < s.batch; ++b)
      if (problem_.seqlen_q(b) > 0) members_[member_count_++] = {b, problem_.seqlen_k(b), 0};
    sort_members();
    number_items();
    return true;
  }

  // Makes about the wanted number of items where the queries of a few tokens are too few for that,
  // or splits keys as it is asked for. Like the tiles this depends on the shape alone. To be called
  // once, after plan().
  void split_keys(const SplitRules& rules) {
    rules_ = rules;
    heads_at_once_ = problem_.shape.heads_k;
    number_items();
    // Large tiles have no need of it.
    if (rules.num_splits == 0 && count_ < rules.wanted_items && tile_rows_ <= kPanelLanes) {
      split_tiles_ = (key_tiles() + rules.wanted_items - 1) / rules.wanted_items;
      number_items();
    }
    // Heads that are done together share what comes from memory, but threads need something to do.
    if (count_ > 0 && count_ < rules.wanted_items) {
      const int64_t groups = (rules.wanted_items + count_ - 1) / count_;
      heads_at_once_ = max<int64_t>(problem_.shape.heads_k / groups, 1);
      number_items();
    }
  }

  // Gives tiles the rows with which `threads` threads take least, where no sum depends on it: of a
  // window with a left side the first part begins where the first row of a tile does. Keys and
  // values are staged in the time of `staging_rows` rows. To be called last.
  void balance(int64_t threads, int64_t staging_rows) {
    const bool is_local = kMask == Mask::window && problem_.shape.window_left < kOpenSide;
    if (has_splits_ && is_local) return;
    if (tiles_of_rows(kPanelLanes) == tiles_of_rows(most_rows_)) return;
    const int64_t splits = max<int64_t>(count_ / tiles_of_rows(tile_rows_), 1);
    // Of unequal tiles a thread takes several.
    const int64_t least_turns = kMask == Mask::window || kMode == Mode::gm1 ? 2 : 1;
    int64_t least_time = INT64_MAX;
    for (int rows = kPanelLanes; rows <= most_rows_;
         rows += kMode == Mode::gm0 ? kPanelLanes : rows) {
      const int64_t tile = rows + staging_rows, items = tiles_of_rows(rows) * splits;
      // Without what all tiles have in common. Threads that are equally quick take whole turns;
      // others end at most one tile after each other.
      const int64_t turns = max((items + threads - 1) / threads, least_turns);
      const int64_t time = turns * tile + (items * staging_rows + (threads - 1) * tile) / threads;
      if (time >= least_time) continue;
      least_time = time;
      tile_rows_ = rows;
    }
    number_items();
  }

  int64_t count() const { return count_; }

  // Whether any tile has more than one part.
  bool has_splits() const { return has_splits_; }

  // Whether items are parts of equally many keys for few rows each.
  bool have_as_many_keys() const { return kMode == Mode::gm0 && has_few_rows(0); }

  // How many there are in one product of all queries with all keys, and one with all values.
  int64_t multiplications() const { return multiplications_; }

  Tile operator[](int64_t number) const {
    int64_t b, first_item, members_before;
    if (kMode == Mode::gm0) {
      const int64_t items = tiles_of(0) * splits_of(0);
      b = members_before = number / items;
      first_item = b * items;
    } else {
      members_before = 0;  // the last member with an item up to this one
      for (int64_t end = member_count_; end - members_before > 1;) {
        const int64_t middle = (members_before + end) / 2;
        (members_[middle].first_item <= number ? members_before : end) = middle;
      }
      b = members_[members_before].index;
      first_item = members_[members_before].first_item;
    }
    const Sequence seq = problem_.sequence(b);
    const int64_t splits = splits_of(b);
    const int64_t tile = (number - first_item) / splits, part = (number - first_item) % splits;
    const int64_t turns = tiles_of_head(b);
    const int64_t heads_k = problem_.shape.heads_k;
    const int64_t groups = head_groups(b), heads_of_group = heads_at_once(b);
    const int64_t first_group = tile / (heads_side_by_side_ * turns) * heads_side_by_side_;
    const int64_t side_by_side = min(heads_side_by_side_, groups - first_group);
    const int64_t among_them = tile - first_group * turns;
    const int64_t turn = among_them / side_by_side;
    const int64_t kv_head = (first_group + among_them % side_by_side) * heads_of_group;
    const int64_t first_row = (turns - 1 - turn) * tile_rows_;
    const int64_t rows = seq.seqlen_q * problem_.group_size() - first_row;
    return {seq,
            kv_head,
            min(heads_of_group, heads_k - kv_head),
            first_row,
            int(min<int64_t>(rows, tile_rows_)),
            members_before * heads_k + kv_head,
            turn,
            turns,
            {part, splits, split_tiles_of(b) * tiles_of_keys(b).keys, number - part}};
  }

  int tile_rows() const { return tile_rows_; }

  // Makes the tiles of so many heads of a sequence take turns.
  void put_heads_side_by_side(int64_t count) { heads_side_by_side_ = count; }

  // (sequence, kv head) pairs that have tiles.
  int64_t heads() const {
    return (kMode == Mode::gm0 ? problem_.shape.batch : member_count_) * problem_.shape.heads_k;
  }

 private:
  // A sequence with queries, and the number of its first item.
  struct Member {
    int64_t index, seqlen_k, first_item;

    bool comes_before(const Member& other) const {
      return seqlen_k != other.seqlen_k ? seqlen_k > other.seqlen_k : index < other.index;
    }
  };

  // More key tiles than any sequence has, and a side of a window that no sequence reaches.
  static constexpr int64_t kAllTiles = int64_t(1) << 40, kOpenSide = kAllTiles;

  // By Shell.
  void sort_members() {
    int64_t gap = 1;
    while (gap < member_count_) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
      for (int64_t i = gap; i < member_count_; ++i) {
        const Member member = members_[i];
        int64_t at = i;
        for (; at >= gap && member.comes_before(members_[at - gap]); at -= gap)
          members_[at] = members_[at - gap];
        members_[at] = member;
      }
  }

  // Counts all items.
  void number_items() {
    if (kMode == Mode::gm0) {
      const int64_t splits = splits_of(0);
      has_splits_ = splits > 1;
      count_ = problem_.shape.batch * tiles_of(0) * splits;
      return;
    }
    count_ = 0;
    has_splits_ = false;
    for (int64_t i = 0; i < member_count_; ++i) {
      const int64_t splits = splits_of(members_[i].index);
      has_splits_ = has_splits_ || splits > 1;
      members_[i].first_item = count_;
      count_ += tiles_of(members_[i].index) * splits;
    }
  }

  // Query tiles of so many rows, as if no heads were done together.
  int64_t tiles_of_rows(int64_t tile_rows) const {
    int64_t sum = 0;
    for (int64_t b = 0; b < (kMode == Mode::gm0 ? 1 : problem_.shape.batch); ++b)
      sum += (problem_.seqlen_q(b) * problem_.group_size() + tile_rows - 1) / tile_rows;
    return sum * problem_.shape.heads_k * (kMode == Mode::gm0 ? problem_.shape.batch : 1);
  }

  // Of all query tiles.
  int64_t key_tiles() const {
    if (kMode == Mode::gm0) return problem_.shape.batch * tiles_of(0) * key_tiles_of(0);
    int64_t sum = 0;
    for (int64_t i = 0; i < member_count_; ++i)
      sum += tiles_of(members_[i].index) * key_tiles_of(members_[i].index);
    return sum;
  }

  // How many key tiles a query tile of sequence b sees at most.
  int64_t key_tiles_of(int64_t b) const {
    const FmhaShape& s = problem_.shape;
    const int64_t tile = tiles_of_keys(b).keys;
    int64_t keys = problem_.seqlen_k(b);
    if (kMask == Mask::window && !kSinkTokens)
      keys = min(keys, s.window_left + s.window_right + narrow_rows_ + tile);
    return (keys + tile - 1) / tile;
  }
  int64_t split_tiles_of(int64_t b) const {
    const int64_t tiles = max<int64_t>(key_tiles_of(b), 1);
    const int64_t most = max(tiles_of_keys(b).least, split_tiles_);
    const int64_t splits = rules_.num_splits ? rules_.num_splits : (tiles + most - 1) / most;
    return (tiles + splits - 1) / splits;
  }
  int64_t splits_of(int64_t b) const {
    const int64_t tiles = split_tiles_of(b);
    return max<int64_t>((key_tiles_of(b) + tiles - 1) / tiles, 1);
  }

  int64_t tiles_of_head(int64_t b) const {
    return (problem_.seqlen_q(b) * problem_.group_size() + tile_rows_ - 1) / tile_rows_;
  }
  bool has_few_rows(int64_t b) const {
    return problem_.seqlen_q(b) * problem_.group_size() <= rules_.few_rows;
  }
  const KeyTiles& tiles_of_keys(int64_t b) const {
    return has_few_rows(b) ? rules_.of_few : rules_.of_many;
  }
  // Those of a sequence that are done together.
  int64_t heads_at_once(int64_t b) const {
    const int64_t rows = problem_.seqlen_q(b) * problem_.group_size();
    if (rows == 0 || !has_few_rows(b)) return 1;
    return min(heads_at_once_, rules_.rows_of_heads / rows);
  }
  int64_t head_groups(int64_t b) const {
    const int64_t heads = heads_at_once(b);
    return (problem_.shape.heads_k + heads - 1) / heads;
  }
  int64_t tiles_of(int64_t b) const { return head_groups(b) * tiles_of_head(b); }

  const Problem& problem_;
  int most_rows_, tile_rows_;
  int narrow_rows_;  // what tiles have before they are balanced
  int64_t wanted_tiles_;
  int64_t heads_side_by_side_ = 1;
  SplitRules rules_{0, 0, {1, 1}, {1, 1}, 0, 0};
  int64_t heads_at_once_ = 1;
  int64_t split_tiles_ = kAllTiles;
  bool has_splits_ = false;
  int64_t count_ = 0;
  int64_t multiplications_ = 0;
  Member* members_ = nullptr;  // gm1: by descending seqlen_k
  int64_t member_count_ = 0;
};

}  // namespace
