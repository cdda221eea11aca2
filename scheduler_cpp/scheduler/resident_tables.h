// ResidentTables: the block tables of all resident requests as they are written for the executor, kept up to date in
// place, and what has changed in them since somebody last asked.
//
// Invariants:
// - Per group one row per request-pool slot: the ids of the slot's tenant, 0 for holes, -1 from its length on. The row of
//   a free slot is -1 throughout.
// - The spans taken, applied in order to a copy that was right before, make that copy equal to the grid.
//
// Ownership: owns the grids. A view keeps its memory alive; it stays current until its grid has to grow, when the next
// view is another piece of memory. Thread safety: none; a view may be read while no call runs.
// Costs: a change costs the entries that it rewrites, whatever the row's length.

#ifndef TOKENSPEED_SCHEDULER_RESIDENT_TABLES_H_
#define TOKENSPEED_SCHEDULER_RESIDENT_TABLES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tokenspeed {

inline constexpr int32_t kTablePadding = -1;

// Row-major, as wide as its longest row has ever been, and then some.
struct BlockTableView {
  std::shared_ptr<const int32_t[]> ids;
  std::size_t rows = 0;
  std::size_t columns = 0;
};

struct BlockTableChanges {
  std::vector<int32_t> spans;  // triples of row, first column and number of entries
  std::vector<int32_t> ids;    // the spans' entries, one span after the other
};

class ResidentTables {
 public:
  // Request-pool slots 1..num_slots; row 0 stays -1.
  ResidentTables(std::size_t num_groups, int32_t num_slots);

  std::size_t NumGroups() const { return grids_.size(); }
  // The entries of a slot's tenant.
  std::span<const int32_t> Row(std::size_t group, int32_t slot) const;

  // Rewrites the entries from `first` (<= the row's length) on; the row may get longer that way.
  void Write(std::size_t group, int32_t slot, std::size_t first, std::span<const int32_t> ids);
  // Turns the entries [first, end) into holes.
  void Erase(std::size_t group, int32_t slot, std::size_t first, std::size_t end);
  // The tenant has left.
  void Clear(int32_t slot);

  BlockTableView View(std::size_t group) const;
  BlockTableChanges TakeChanges(std::size_t group);

 private:
  struct Span {
    int32_t slot;
    int32_t first;
    int32_t count;
  };
  struct Grid {
    std::shared_ptr<int32_t[]> ids;
    std::size_t columns = 0;
    std::vector<std::size_t> lengths;  // per slot
    std::vector<Span> changes;

    int32_t* RowAt(int32_t slot) const { return ids.get() + static_cast<std::size_t>(slot) * columns; }
  };

  void Widen(Grid& grid, std::size_t columns) const;
  static void Note(Grid& grid, int32_t slot, std::size_t first, std::size_t count);

  std::size_t num_rows_;
  std::vector<Grid> grids_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_RESIDENT_TABLES_H_
