// Which snapshots of a request may be shared: recording them, and forgetting them once they are hashed (S-ST11).

#include "scheduler/cache_progress.h"

#include <gtest/gtest.h>


namespace tokenspeed {
namespace {

std::vector<int32_t> Boundaries(const CacheProgress& progress) {
  const auto view = progress.materialized_state_boundaries();
  return {view.begin(), view.end()};
}

TEST(CacheProgress, ST11_boundaries_are_recorded_once_aligned_and_in_order) {
  CacheProgress progress;
  for (const int32_t boundary : {4, 4, 8, 13, 16, 12, 0}) progress.Record(boundary, 4);
  EXPECT_EQ(Boundaries(progress), (std::vector<int32_t>{4, 8, 16}));
  EXPECT_TRUE(progress.HasMaterialized(8));
  EXPECT_FALSE(progress.HasMaterialized(12));
}

TEST(CacheProgress, a_boundary_that_is_hashed_already_proves_nothing) {
  CacheProgress progress;
  progress.num_hashed_pages = 2;
  progress.Record(8, 4);
  EXPECT_TRUE(progress.materialized_state_boundaries().empty());
  progress.Record(12, 4);
  EXPECT_EQ(Boundaries(progress), (std::vector<int32_t>{12}));
}

TEST(CacheProgress, ST12_only_hashed_boundaries_are_forgotten) {
  CacheProgress progress;
  for (const int32_t boundary : {4, 8, 16}) progress.Record(boundary, 4);
  progress.num_hashed_pages = 3;
  progress.DiscardHashed(4);
  EXPECT_EQ(Boundaries(progress), (std::vector<int32_t>{16}));
  progress.num_hashed_pages = 4;
  progress.DiscardHashed(4);
  EXPECT_TRUE(progress.materialized_state_boundaries().empty());
}

}  // namespace
}  // namespace tokenspeed
