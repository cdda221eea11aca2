#include "scheduler/resident_tables.h"

#include <algorithm>

#include "core/check.h"

namespace tokenspeed {
namespace {

// Rows start with room for a short prompt, so that grids seldom move.
constexpr std::size_t kFirstColumns = 64;

}  // namespace

ResidentTables::ResidentTables(std::size_t num_groups, int32_t num_slots)
    : num_rows_(static_cast<std::size_t>(num_slots) + 1), grids_(num_groups) {
  for (Grid& grid : grids_) {
    grid.lengths.assign(num_rows_, 0);
    Widen(grid, kFirstColumns);
  }
}

std::span<const int32_t> ResidentTables::Row(std::size_t group, int32_t slot) const {
  const Grid& grid = grids_[group];
  return {grid.RowAt(slot), grid.lengths[static_cast<std::size_t>(slot)]};
}

void ResidentTables::Write(std::size_t group, int32_t slot, std::size_t first, std::span<const int32_t> ids) {
  if (ids.empty()) return;
  Grid& grid = grids_[group];
  std::size_t& length = grid.lengths[static_cast<std::size_t>(slot)];
  TOKENSPEED_CHECK(first <= length, "a table row would get a gap");
  const std::size_t end = first + ids.size();
  if (end > grid.columns) Widen(grid, end);
  std::copy(ids.begin(), ids.end(), grid.RowAt(slot) + first);
  length = std::max(length, end);
  Note(grid, slot, first, ids.size());
}

void ResidentTables::Erase(std::size_t group, int32_t slot, std::size_t first, std::size_t end) {
  if (first >= end) return;
  Grid& grid = grids_[group];
  std::fill(grid.RowAt(slot) + first, grid.RowAt(slot) + end, 0);
  Note(grid, slot, first, end - first);
}

void ResidentTables::Clear(int32_t slot) {
  for (Grid& grid : grids_) {
    std::size_t& length = grid.lengths[static_cast<std::size_t>(slot)];
    if (length == 0) continue;
    std::fill(grid.RowAt(slot), grid.RowAt(slot) + length, kTablePadding);
    Note(grid, slot, 0, length);
    length = 0;
  }
}

BlockTableView ResidentTables::View(std::size_t group) const {
  const Grid& grid = grids_[group];
  return {.ids = grid.ids, .rows = num_rows_, .columns = grid.columns};
}

BlockTableChanges ResidentTables::TakeChanges(std::size_t group) {
  Grid& grid = grids_[group];
  BlockTableChanges changes;
  changes.spans.reserve(3 * grid.changes.size());
  for (const Span& span : grid.changes) {
    changes.spans.insert(changes.spans.end(), {span.slot, span.first, span.count});
    const int32_t* from = grid.RowAt(span.slot) + span.first;
    changes.ids.insert(changes.ids.end(), from, from + span.count);
  }
  grid.changes.clear();
  return changes;
}

void ResidentTables::Widen(Grid& grid, std::size_t columns) const {
  const std::size_t wider = std::max({columns, 2 * grid.columns, kFirstColumns});
  std::shared_ptr<int32_t[]> ids(new int32_t[num_rows_ * wider]);
  std::fill_n(ids.get(), num_rows_ * wider, kTablePadding);
  for (std::size_t row = 0; row < num_rows_; ++row) {
    std::copy_n(grid.ids.get() + row * grid.columns, grid.lengths[row], ids.get() + row * wider);
  }
  grid.ids = std::move(ids);
  grid.columns = wider;
}

void ResidentTables::Note(Grid& grid, int32_t slot, std::size_t first, std::size_t count) {
  grid.changes.push_back({slot, static_cast<int32_t>(first), static_cast<int32_t>(count)});
}

}  // namespace tokenspeed
