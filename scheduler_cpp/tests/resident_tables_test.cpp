// The grids against plain lists of rows, and a copy that follows by the changes alone.

#include "scheduler/resident_tables.h"

#include <gtest/gtest.h>

#include <random>

namespace tokenspeed {
namespace {

constexpr int32_t kSlots = 5;

// What the executor does with the changes.
void Follow(std::vector<std::vector<int32_t>>& copy, const BlockTableChanges& changes) {
  std::size_t next = 0;
  for (std::size_t span = 0; span < changes.spans.size(); span += 3) {
    std::vector<int32_t>& row = copy[static_cast<std::size_t>(changes.spans[span])];
    const auto first = static_cast<std::size_t>(changes.spans[span + 1]);
    const auto count = static_cast<std::size_t>(changes.spans[span + 2]);
    if (row.size() < first + count) row.resize(first + count, kTablePadding);
    for (std::size_t i = 0; i < count; ++i) row[first + i] = changes.ids[next++];
  }
  ASSERT_EQ(next, changes.ids.size());
}

void ExpectRows(const BlockTableView& view, const std::vector<std::vector<int32_t>>& rows) {
  ASSERT_EQ(view.rows, rows.size());
  for (std::size_t row = 0; row < view.rows; ++row) {
    for (std::size_t column = 0; column < view.columns; ++column) {
      const int32_t expected = column < rows[row].size() ? rows[row][column] : kTablePadding;
      ASSERT_EQ(view.ids[row * view.columns + column], expected);
    }
  }
}

TEST(ResidentTables, grids_and_their_followers_equal_plain_rows) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    ResidentTables tables(2, kSlots);
    std::vector<std::vector<int32_t>> rows(kSlots + 1);
    std::vector<std::vector<int32_t>> copy(kSlots + 1);
    for (int step = 0; step < 300; ++step) {
      const auto slot = static_cast<int32_t>(1 + random() % kSlots);
      std::vector<int32_t>& row = rows[static_cast<std::size_t>(slot)];
      const std::size_t first = row.empty() ? 0 : random() % (row.size() + 1);
      switch (random() % 6) {
        case 0:
          tables.Clear(slot);
          row.clear();
          break;
        case 1:
          tables.Erase(1, slot, first, row.size());
          std::fill(row.begin() + static_cast<std::ptrdiff_t>(first), row.end(), 0);
          break;
        case 2:
          Follow(copy, tables.TakeChanges(1));
          break;
        default: {
          std::vector<int32_t> ids(random() % 30);
          for (int32_t& id : ids) id = static_cast<int32_t>(random() % 1000);
          tables.Write(1, slot, first, ids);
          if (row.size() < first + ids.size()) row.resize(first + ids.size());
          std::copy(ids.begin(), ids.end(), row.begin() + static_cast<std::ptrdiff_t>(first));
        }
      }
      EXPECT_EQ(std::vector<int32_t>(tables.Row(1, slot).begin(), tables.Row(1, slot).end()), row);
    }
    ExpectRows(tables.View(1), rows);
    Follow(copy, tables.TakeChanges(1));
    ExpectRows(tables.View(1), copy);
    EXPECT_TRUE(tables.TakeChanges(1).spans.empty());
    EXPECT_TRUE(tables.TakeChanges(0).spans.empty());
  }
}

TEST(ResidentTables, a_view_outlives_the_grid_it_was_taken_of) {
  ResidentTables tables(1, 1);
  tables.Write(0, 1, 0, std::vector<int32_t>{7});
  const BlockTableView before = tables.View(0);
  tables.Write(0, 1, 1, std::vector<int32_t>(10'000, 8));
  EXPECT_EQ(before.ids[before.columns], 7);
  const BlockTableView after = tables.View(0);
  EXPECT_GE(after.columns, std::size_t{10'001});
  EXPECT_EQ(after.ids[after.columns + 10'000], 8);
}

}  // namespace
}  // namespace tokenspeed
