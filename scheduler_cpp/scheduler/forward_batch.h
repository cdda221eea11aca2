// One model step as the executor sees it: prefill rows first, then decode rows, with a rectangular block
// table per cache group, if plans are to carry them. Filled row by row by the plan builder and read-only afterwards.

#ifndef TOKENSPEED_SCHEDULER_FORWARD_BATCH_H_
#define TOKENSPEED_SCHEDULER_FORWARD_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "scheduler/resident_tables.h"

namespace tokenspeed {

// Row-major table: 0 is a hole, -1 stands right of a shorter row.
struct BlockTableGrid {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::vector<int32_t> ids;

  [[nodiscard]] std::span<const int32_t> Row(std::size_t row) const {
    return {ids.data() + row * columns, columns};
  }
};

class ForwardBatch {
 public:
  // In place of the token that a decode row is to feed.
  static constexpr int32_t kTokenIsOnDevice = -1;

  struct PrefillRow {
    const std::string& request_id;
    int32_t request_pool_index = 0;
    std::span<const int32_t> prompt;  // everything to prefill, of which [start, start + length) is fed
    int32_t start = 0;
    int32_t length = 0;
    int32_t replay = 0;  // leading tokens of these that are fed again
  };

  struct DecodeRow {
    const std::string& request_id;
    int32_t request_pool_index = 0;
    int32_t input_length = 0;
    int32_t prefill_length = 0;
    int32_t input_id = kTokenIsOnDevice;
    std::span<const int32_t> spec_candidates = {};
  };

  // Room for so many decode rows, so that adding them moves nothing.
  void Reserve(std::size_t decode_rows);
  void AddPrefill(const PrefillRow& row);
  void AddDecode(const DecodeRow& row);
  // Orders prefill rows before decode rows.
  void Seal();
  // Copies the rows' tables, as they are now, out of the resident ones. After Seal.
  void CopyTables(std::span<const std::string> group_ids, const ResidentTables& tables);

  [[nodiscard]] std::size_t NumRows() const {
    return request_ids.size() + prefill_.request_ids.size() + decode_.request_ids.size();
  }
  [[nodiscard]] std::size_t NumExtends() const { return extend_prefix_lens.size(); }

  // Per row; filled by Seal.
  std::vector<std::string> request_ids;
  std::vector<int32_t> request_pool_indices;
  std::vector<int32_t> input_lengths;
  std::vector<int32_t> prefill_lengths;
  // Concatenated over the prefill rows.
  std::vector<int32_t> input_ids;
  std::vector<int32_t> shifted_input_ids;
  // Per prefill row.
  std::vector<int32_t> extend_prefix_lens;
  std::vector<int32_t> extend_replay_lens;
  // Per decode row.
  std::vector<int32_t> decode_input_ids;
  std::vector<std::vector<int32_t>> spec_candidate_ids;

  // Only for groups in which some row has a table.
  std::map<std::string, BlockTableGrid> block_tables;
  bool has_tables = false;

 private:
  // The columns that both kinds of row have; joined by Seal.
  struct Rows {
    std::vector<std::string> request_ids;
    std::vector<int32_t> request_pool_indices;
    std::vector<int32_t> input_lengths;
    std::vector<int32_t> prefill_lengths;
  };

  void TakeRows(Rows& rows);

  Rows prefill_;
  Rows decode_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_FORWARD_BATCH_H_
