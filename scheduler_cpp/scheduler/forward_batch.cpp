#include "scheduler/forward_batch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tokenspeed {
namespace {

constexpr int32_t kPastPrompt = -1;

template <typename T>
void MoveBehind(std::vector<T>& target, std::vector<T>& source) {
  if (target.empty()) {
    target.swap(source);
    return;
  }
  target.insert(target.end(), std::make_move_iterator(source.begin()), std::make_move_iterator(source.end()));
}

}  // namespace

void ForwardBatch::Reserve(std::size_t decode_rows) {
  decode_.request_ids.reserve(decode_rows);
  decode_.request_pool_indices.reserve(decode_rows);
  decode_.input_lengths.reserve(decode_rows);
  decode_.prefill_lengths.reserve(decode_rows);
  decode_input_ids.reserve(decode_rows);
  spec_candidate_ids.reserve(decode_rows);
}

void ForwardBatch::AddPrefill(const PrefillRow& row) {
  prefill_.request_ids.push_back(row.request_id);
  prefill_.request_pool_indices.push_back(row.request_pool_index);
  prefill_.input_lengths.push_back(row.length);
  prefill_.prefill_lengths.push_back(static_cast<int32_t>(row.prompt.size()));
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
  decode_input_ids.push_back(row.input_id);
  spec_candidate_ids.emplace_back(row.spec_candidates.begin(), row.spec_candidates.end());
}

void ForwardBatch::TakeRows(Rows& rows) {
  MoveBehind(request_ids, rows.request_ids);
  MoveBehind(request_pool_indices, rows.request_pool_indices);
  MoveBehind(input_lengths, rows.input_lengths);
  MoveBehind(prefill_lengths, rows.prefill_lengths);
}

void ForwardBatch::Seal() {
  TakeRows(prefill_);
  TakeRows(decode_);
  prefill_ = Rows{};
  decode_ = Rows{};
}

void ForwardBatch::CopyTables(std::span<const std::string> group_ids, const ResidentTables& tables) {
  has_tables = true;
  for (std::size_t group = 0; group < group_ids.size(); ++group) {
    BlockTableGrid grid;
    grid.rows = request_pool_indices.size();
    for (const int32_t slot : request_pool_indices) grid.columns = std::max(grid.columns, tables.Row(group, slot).size());
    if (grid.columns == 0) continue;
    grid.ids.reserve(grid.rows * grid.columns);
    for (const int32_t slot : request_pool_indices) {
      const std::span<const int32_t> row = tables.Row(group, slot);
      grid.ids.insert(grid.ids.end(), row.begin(), row.end());
      grid.ids.insert(grid.ids.end(), grid.columns - row.size(), kTablePadding);
    }
    block_tables.emplace(group_ids[group], std::move(grid));
  }
}

}  // namespace tokenspeed
