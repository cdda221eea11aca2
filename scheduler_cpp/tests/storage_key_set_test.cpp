// Vectors S-L35 to S-L38, and the set against a plain list (invariant I37).

#include "prefix/storage_key_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Hashes;

CacheKey Key(const PrefixHash& hash, int32_t group = 0, int32_t offset = 0) {
  return {.content_hash = hash, .namespace_id = 0, .group_id = group, .page_offset = offset};
}

std::vector<bool> Known(const StorageKeySet& set, const std::vector<PrefixHash>& hashes, int32_t group = 0) {
  std::vector<bool> known;
  for (const PrefixHash& hash : hashes) known.push_back(set.Contains(Key(hash, group)));
  return known;
}

TEST(StorageKeySet, L35_the_oldest_make_way_and_a_batch_keeps_its_start) {
  const auto h = Hashes(1, 3);
  StorageKeySet set(2);
  set.Register({Key(h[0]), Key(h[1]), Key(h[2])});
  EXPECT_EQ(Known(set, h), (std::vector{true, true, false}));
  set.Register({Key(h[2])});
  EXPECT_EQ(Known(set, h), (std::vector{false, true, true}));
  set.Register({Key(h[0])});
  EXPECT_EQ(Known(set, h), (std::vector{true, false, true}));
}

TEST(StorageKeySet, L36_what_a_batch_cannot_keep_is_forgotten_even_if_it_was_known) {
  const auto h = Hashes(1, 3);
  StorageKeySet set(2);
  set.Register({Key(h[1]), Key(h[2])});
  set.Register({Key(h[0]), Key(h[1]), Key(h[2])});
  EXPECT_EQ(Known(set, h), (std::vector{true, true, false}));
}

TEST(StorageKeySet, L37_groups_keep_the_same_pages) {
  const auto h = Hashes(1, 3);
  StorageKeySet set(4);
  std::vector<CacheKey> by_group;
  for (int32_t group : {0, 1}) {
    for (const PrefixHash& hash : h) by_group.push_back(Key(hash, group));
  }
  set.Register(by_group);
  for (int32_t group : {0, 1}) EXPECT_EQ(Known(set, h, group), (std::vector{true, true, false}));
}

TEST(StorageKeySet, L38_unregistered_keys_leave_nothing_behind) {
  const auto h = Hashes(1, 2);
  StorageKeySet set(2);
  for (int i = 0; i < 8; ++i) {
    set.Register({Key(h[0]), Key(h[1])});
    EXPECT_EQ(set.NumKeys(), 2);
    set.Unregister(std::vector{Key(h[1]), Key(h[0]), Key(h[0])});
    EXPECT_EQ(set.NumKeys(), 0);
  }
}

TEST(StorageKeySet, remembered_keys_push_the_oldest_out) {
  const auto h = Hashes(1, 3);
  StorageKeySet set(2);
  for (const PrefixHash& hash : h) set.Remember(Key(hash));
  set.Remember(Key(h[1]));
  EXPECT_EQ(Known(set, h), (std::vector{false, true, true}));
  StorageKeySet none(0);
  EXPECT_EQ(none.limit(), 1);
}

// The rules again, on a list.
class PlainSet {
 public:
  explicit PlainSet(std::size_t limit) : limit_(limit) {}
  void Remember(const CacheKey& key) {
    if (Has(key)) return;
    keys_.push_back(key);
    if (keys_.size() > limit_) keys_.erase(keys_.begin());
  }
  void Register(std::vector<CacheKey> batch) {
    std::vector<CacheKey> order;
    for (const CacheKey& first : batch) {
      for (int32_t offset = 0; offset < 2; ++offset) {
        for (int32_t group = 0; group < 2; ++group) {
          const CacheKey key = Key(first.content_hash, group, offset);
          const bool named = std::find(batch.begin(), batch.end(), key) != batch.end();
          if (named && std::find(order.begin(), order.end(), key) == order.end()) order.push_back(key);
        }
      }
    }
    for (std::size_t i = limit_; i < order.size(); ++i) std::erase(keys_, order[i]);
    order.resize(std::min(order.size(), limit_));
    for (const CacheKey& key : order) {
      if (Has(key)) continue;
      if (keys_.size() == limit_) {
        keys_.erase(std::find_if(keys_.begin(), keys_.end(), [&](const CacheKey& old) {
          return std::find(order.begin(), order.end(), old) == order.end();
        }));
      }
      keys_.push_back(key);
    }
  }
  void Unregister(const std::vector<CacheKey>& batch) {
    for (const CacheKey& key : batch) std::erase(keys_, key);
  }
  bool Has(const CacheKey& key) const { return std::find(keys_.begin(), keys_.end(), key) != keys_.end(); }
  std::size_t size() const { return keys_.size(); }

 private:
  std::size_t limit_;
  std::vector<CacheKey> keys_;
};

TEST(StorageKeySet, I37_random_calls_do_what_a_plain_list_does) {
  const auto h = Hashes(1, 6);
  std::mt19937 random(1);
  const auto any = [&] { return Key(h[random() % h.size()], static_cast<int32_t>(random() % 2), random() % 2); };
  for (std::size_t limit : {1u, 2u, 5u, 9u, 40u}) {
    StorageKeySet set(static_cast<int64_t>(limit));
    PlainSet plain(limit);
    for (int step = 0; step < 3000; ++step) {
      std::vector<CacheKey> batch(1 + random() % 12);
      for (CacheKey& key : batch) key = any();
      switch (random() % 3) {
        case 0:
          set.Remember(batch[0]);
          plain.Remember(batch[0]);
          break;
        case 1:
          set.Register(batch);
          plain.Register(batch);
          break;
        default:
          set.Unregister(batch);
          plain.Unregister(batch);
      }
      ASSERT_EQ(set.NumKeys(), static_cast<int64_t>(plain.size()));
      ASSERT_LE(set.NumKeys(), set.limit());
      for (const PrefixHash& hash : h) {
        for (int32_t group : {0, 1}) {
          for (int32_t offset : {0, 1}) {
            const CacheKey key = Key(hash, group, offset);
            ASSERT_EQ(set.Contains(key), plain.Has(key));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tokenspeed
