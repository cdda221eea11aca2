// The arithmetic of chunks and reserves, against the tables of the specification (S-AR).

#include "scheduler/prefill_chunk.h"

#include <gtest/gtest.h>
#include "scheduler/reserve.h"

namespace tokenspeed {
namespace {

CacheGroupConfig Full() { return CacheGroupConfig{.group_id = "full", .block_granularity = 4}; }

CacheGroupConfig Sliding(int32_t window) {
  CacheGroupConfig group = Full();
  group.retention = CacheRetention::kSlidingWindow;
  group.sliding_window_tokens = window;
  return group;
}

CacheGroupConfig State() {
  CacheGroupConfig group = Full();
  group.family = CacheGroupFamily::kState;
  return group;
}

TEST(ChunkArithmetic, AR1_AR2_AlignedChunksEndOnPagesOrComplete) {
  EXPECT_EQ(AlignPrefillChunk(16, 24, 24, 4, 32), 16);
  EXPECT_EQ(AlignPrefillChunk(16, 24, 8, 4, 32), 8);
  EXPECT_EQ(AlignPrefillChunk(24, 16, 16, 4, 32), 8);
  EXPECT_EQ(AlignPrefillChunk(24, 4, 16, 4, 32), 4);
  EXPECT_EQ(AlignPrefillChunk(32, 16, 10, 4, 32), 8);
  EXPECT_EQ(AlignPrefillChunk(6, 20, 10, 4, 0), 2);
  EXPECT_EQ(AlignPrefillChunk(6, 20, 1, 4, 0), 0);
  EXPECT_EQ(AlignPrefillChunk(50432, 868, 868, 128, 0), 868);
  EXPECT_EQ(AlignPrefillChunk(50432, 868, 800, 128, 0), 768);
  EXPECT_EQ(AlignPrefillChunk(51200, 768, 768, 128, 0), 768);
  EXPECT_EQ(AlignPrefillChunk(51200, 100, 100, 128, 0), 100);
}

TEST(ChunkArithmetic, AR9_AR10_AChunkLeavesItsFirstSnapshotAtTheLastBoundaryOrAtItsEnd) {
  EXPECT_EQ(FirstSnapshotTokens(50432, 51300, 128), 51200);
  EXPECT_EQ(FirstSnapshotTokens(51200, 51300, 128), 51300);
  EXPECT_EQ(FirstSnapshotTokens(0, 10, 8), 8);
  EXPECT_EQ(FirstSnapshotTokens(8, 10, 8), 10);
  EXPECT_EQ(FirstSnapshotTokens(0, 8, 8), 8);
  EXPECT_EQ(FirstSnapshotTokens(0, 3, 8), 3);
}

TEST(ChunkArithmetic, AR3_AChunkLeavesAWholeReplayWindowOrNothing) {
  EXPECT_EQ(ChunkKeepingFinalWindow(30, 30, 8), 30);
  EXPECT_EQ(ChunkKeepingFinalWindow(64, 72, 8), 64);
  EXPECT_EQ(ChunkKeepingFinalWindow(64, 100, 8), 64);
  EXPECT_EQ(ChunkKeepingFinalWindow(64, 70, 8), 62);
  EXPECT_EQ(ChunkKeepingFinalWindow(10, 11, 8), 3);
  EXPECT_EQ(ChunkKeepingFinalWindow(4, 6, 8), 0);
  EXPECT_EQ(ChunkKeepingFinalWindow(0, 6, 8), 0);
  EXPECT_EQ(ChunkKeepingFinalWindow(64, 70, 0), 64);
}

TEST(ChunkArithmetic, AR4_ReplayTakesItsPartOfTheBudget) {
  const PrefillChunkRules rules{.prefix_granularity = 4, .replay_window = 8, .has_state_group = false};
  EXPECT_EQ(rules.ChunkTokens(16, true, 100, 40, 0), 32);
  EXPECT_EQ(rules.ChunkTokens(4, true, 100, 40, 0), 36);
  EXPECT_EQ(rules.ChunkTokens(16, true, 100, 8, 0), 0);
  EXPECT_EQ(rules.ChunkTokens(16, true, 100, 6, 0), 0);
  EXPECT_EQ(rules.ChunkTokens(16, false, 100, 40, 0), 40);
  EXPECT_EQ(rules.ChunkTokens(0, true, 70, 64, 0), 62);
  EXPECT_EQ(rules.ChunkTokens(16, true, 100, 40, 24), 8);
  EXPECT_EQ(rules.ChunkTokens(48, true, 8, 64, 52), 8);
}

TEST(ChunkArithmetic, APromotionAlignsWhenTheBudgetAllowsAndNeverStopsAPrompt) {
  const PrefillChunkRules rules{.prefix_granularity = 4, .replay_window = 0, .has_state_group = false};
  EXPECT_EQ(rules.ChunkTokens(0, true, 100, 6, 8), 4);
  EXPECT_EQ(rules.ChunkTokens(0, true, 100, 3, 8), 3);
  EXPECT_EQ(rules.ChunkTokens(3, false, 97, 3, 8), 1);
  EXPECT_EQ(rules.ChunkTokens(0, true, 100, 3, 0), 3);
  const PrefillChunkRules state{.prefix_granularity = 4, .replay_window = 0, .has_state_group = true};
  EXPECT_EQ(state.ChunkTokens(0, true, 100, 3, 8), 0);
}

TEST(ChunkArithmetic, AR5_TheBudgetThatIsSureToMoveAPrefill) {
  EXPECT_EQ((PrefillChunkRules{.prefix_granularity = 4, .replay_window = 8}.MinChunkTokens()), 16);
  EXPECT_EQ((PrefillChunkRules{.prefix_granularity = 16, .replay_window = 8}.MinChunkTokens()), 24);
  EXPECT_EQ((PrefillChunkRules{.prefix_granularity = 4}.MinChunkTokens()), 0);
  EXPECT_EQ((PrefillChunkRules{.prefix_granularity = 4, .replay_window = 0, .has_state_group = true}.MinChunkTokens()),
            4);
}

TEST(ChunkArithmetic, AR6_AR7_ReservesPerKindOfGroup) {
  const PrefillReserve open{.decode_width = 2, .prompt_headroom = 30};
  EXPECT_EQ(open.TokensFor(Full()), 30);
  EXPECT_EQ(open.TokensFor(Sliding(8)), 0);
  EXPECT_EQ(open.TokensFor(State()), 0);
  const PrefillReserve complete{.decode_width = 2, .completes = true, .growth = true};
  EXPECT_EQ(complete.TokensFor(Full()), 2);
  EXPECT_EQ(complete.TokensFor(Sliding(8)), 2);
  EXPECT_EQ(complete.TokensFor(State()), 4);
}

TEST(ChunkArithmetic, AR8_ASlidingReserveIsBoundedByWindowHeadroomAndWhatOthersMayPin) {
  const auto tokens = [](bool completes, int64_t headroom, int64_t unrecycled) {
    const PrefillReserve reserve{
        .decode_width = 2, .completes = completes, .prompt_headroom = headroom, .unrecycled = unrecycled};
    return reserve.TokensFor(Sliding(8));
  };
  EXPECT_EQ(tokens(false, 30, 5), 5);
  EXPECT_EQ(tokens(false, 30, 20), 7);
  EXPECT_EQ(tokens(false, 4, 20), 4);
  EXPECT_EQ(tokens(true, 0, 20), 2);
}

TEST(ChunkArithmetic, AR11_HeadroomGrowsWithRetractionsAndShrinksWithWhatIsLeft) {
  const auto headroom = [](int64_t retractions, int64_t generated, int64_t max_new) {
    return GenerationBudget{.max_new_tokens = max_new, .generated = generated, .retractions = retractions}
        .AdmissionHeadroom();
  };
  EXPECT_EQ(headroom(0, 0, 6000), 4096);
  EXPECT_EQ(headroom(1, 0, 6000), 6000);
  EXPECT_EQ(headroom(2, 0, 6000), 6000);
  EXPECT_EQ(headroom(0, 1000, 6000), 4096);
  EXPECT_EQ(headroom(1, 1000, 6000), 5000);
  EXPECT_EQ(headroom(0, 0, 0), 0);
}

TEST(ChunkArithmetic, AR12_CoverIsJudgedOnTheRestAtAdmission) {
  EXPECT_FALSE((GenerationBudget{.max_new_tokens = 6000, .generated = 4097}.ReserveCoversGeneration()));
  EXPECT_TRUE((GenerationBudget{
      .max_new_tokens = 6000, .generated = 1000, .generated_at_admission = 1000, .retractions = 1}
                   .ReserveCoversGeneration()));
  EXPECT_FALSE((GenerationBudget{.max_new_tokens = 0}.ReserveCoversGeneration()));
}

}  // namespace
}  // namespace tokenspeed
