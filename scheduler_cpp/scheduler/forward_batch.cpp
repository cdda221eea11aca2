#include "scheduler/forward_batch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tokenspeed {
namespace {

constexpr int32_t kPadding = -1;
constexpr int32_t kPastPrompt = -1;

template <typename T>
void MoveBehind(std::vector<T>& target, std::vector<T>& source) {
  target.insert(target.end(), std::make_move_iterator(source.begin()), std::make_move_iterator(source.end()));
}

std::span<const int32_t> IdsOf(ForwardBatch::RowTables tables, std::size_t group) {
  return group < tables.size() ? std::span<const int32_t>(tables[group]) : std::span<const int32_t>();
}

}  // namespace

void ForwardBatch::AddPrefill(const PrefillRow& row) {
  prefill_.request_ids.push_back(row.request_id);
  prefill_.request_pool_indices.push_back(row.request_pool_index);
  prefill_.input_lengths.push_back(row.length);
  prefill_.prefill_lengths.push_back(static_cast<int32_t>(row.prompt.size()));
  prefill_.tables.push_back(row.tables);
  extend_prefix_lens.push_back(row.start);
  extend_replay_lens.push_back(row.replay);
  const auto fed = row.prompt.subspan(static_cast<std::size_t>(row.start), static_cast<std::size_t>(row.length));
  input_ids.insert(input_ids.end(), fed.begin(), fed.end());
  const auto after = row.prompt.subspan(static_cast<std::size_t>(row.start) + 1);
  const std::size_t known = std::min(after.size(), fed.size());
  shifted_input_ids.insert(shifted_input_ids.end(), after.begin(),
                           after.begin() + static_cast<std::ptrdiff_t>(known));
  shifted_input_ids.insert(shifted_input_ids.end(), fed.size() - known, kPastPrompt);
}

void ForwardBatch::AddDecode(const DecodeRow& row) {
  decode_.request_ids.push_back(row.request_id);
  decode_.request_pool_indices.push_back(row.request_pool_index);
  decode_.input_lengths.push_back(row.input_length);
  decode_.prefill_lengths.push_back(row.prefill_length);
  decode_.tables.push_back(row.tables);
  decode_input_ids.push_back(row.input_id);
  spec_candidate_ids.emplace_back(row.spec_candidates.begin(), row.spec_candidates.end());
}

void ForwardBatch::TakeRows(Rows& rows) {
  MoveBehind(request_ids, rows.request_ids);
  MoveBehind(request_pool_indices, rows.request_pool_indices);
  MoveBehind(input_lengths, rows.input_lengths);
  MoveBehind(prefill_lengths, rows.prefill_lengths);
}

void ForwardBatch::BuildGrid(const std::string& group_id, std::size_t group, std::span<const RowTables> tables) {
  BlockTableGrid grid;
  grid.rows = tables.size();
  for (const RowTables& row : tables) {
    grid.columns = std::max(grid.columns, IdsOf(row, group).size());
  }
  if (grid.columns == 0) {
    return;
  }
  grid.ids.reserve(grid.rows * grid.columns);
  for (const RowTables& row : tables) {
    const auto ids = IdsOf(row, group);
    grid.ids.insert(grid.ids.end(), ids.begin(), ids.end());
    grid.ids.insert(grid.ids.end(), grid.columns - ids.size(), kPadding);
  }
  block_tables.emplace(group_id, std::move(grid));
}

void ForwardBatch::Seal(std::span<const std::string> group_ids) {
  std::vector<RowTables> tables = std::move(prefill_.tables);
  MoveBehind(tables, decode_.tables);
  TakeRows(prefill_);
  TakeRows(decode_);
  for (std::size_t group = 0; group < group_ids.size(); ++group) {
    BuildGrid(group_ids[group], group, tables);
  }
  // The views into the requests' tables end here; only the copies above leave the scheduler.
  prefill_ = Rows{};
  decode_ = Rows{};
}

}  // namespace tokenspeed
