// How rows become a batch: order, padding, holes, and groups that some rows lack (S-SC31).

#include "scheduler/forward_batch.h"

#include <gtest/gtest.h>

namespace tokenspeed {
namespace {

using Tables = std::vector<std::vector<int32_t>>;

ForwardBatch Decodes(const std::vector<Tables>& rows, const std::vector<std::string>& groups) {
  ResidentTables tables(groups.size(), static_cast<int32_t>(rows.size()));
  ForwardBatch batch;
  const std::string id = "r";
  int32_t slot = 0;
  for (const Tables& row : rows) {
    batch.AddDecode({.request_id = id, .request_pool_index = ++slot, .input_length = 1});
    for (std::size_t group = 0; group < row.size(); ++group) tables.Write(group, slot, 0, row[group]);
  }
  batch.Seal();
  batch.CopyTables(groups, tables);
  return batch;
}

TEST(ForwardBatch, SC31_ShorterRowsArePaddedAndHolesStay) {
  const ForwardBatch batch = Decodes({{{10, 11, 12}}, {{20}}}, {"g"});
  EXPECT_EQ(batch.block_tables.at("g").ids, (std::vector<int32_t>{10, 11, 12, 20, -1, -1}));
  const ForwardBatch holes = Decodes({{{0, 31}}, {{40}}}, {"g"});
  EXPECT_EQ(holes.block_tables.at("g").ids, (std::vector<int32_t>{0, 31, 40, -1}));
}

TEST(ForwardBatch, SC31_AGroupThatOneRowHasGetsAKeyAndTheOthersPadding) {
  const ForwardBatch batch = Decodes({{{1}, {}}, {{2}, {5, 6}}}, {"a", "b", "c"});
  EXPECT_EQ(batch.block_tables.size(), std::size_t{2});
  EXPECT_EQ(batch.block_tables.at("b").ids, (std::vector<int32_t>{-1, -1, 5, 6}));
}

TEST(ForwardBatch, PrefillRowsComeFirstWhateverTheOrderOfArrival) {
  const std::string decode = "d";
  const std::string prefill = "p";
  const std::vector<int32_t> prompt = {5, 6, 7, 8};
  ForwardBatch batch;
  batch.AddDecode(
      {.request_id = decode, .request_pool_index = 1, .input_length = 1, .prefill_length = 9});
  batch.AddPrefill(
      {.request_id = prefill, .request_pool_index = 2, .prompt = prompt, .start = 1, .length = 2, .replay = 1});
  EXPECT_EQ(batch.NumRows(), std::size_t{2});
  batch.Seal();
  EXPECT_EQ(batch.request_ids, (std::vector<std::string>{"p", "d"}));
  EXPECT_EQ(batch.request_pool_indices, (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(batch.input_lengths, (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(batch.prefill_lengths, (std::vector<int32_t>{4, 9}));
  EXPECT_EQ(batch.input_ids, (std::vector<int32_t>{6, 7}));
  EXPECT_EQ(batch.shifted_input_ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(batch.extend_prefix_lens, (std::vector<int32_t>{1}));
  EXPECT_EQ(batch.extend_replay_lens, (std::vector<int32_t>{1}));
  EXPECT_EQ(batch.decode_input_ids, (std::vector<int32_t>{-1}));
}

}  // namespace
}  // namespace tokenspeed
