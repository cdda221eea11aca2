#include "prefix/key_table.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <vector>

namespace tokenspeed {
namespace {

struct Named {
  CacheKey key;
  uint32_t weight = 0;
  uint32_t number = 0;
  int value = 0;
};

// Only the first `spread` bits of the hash differ; what tells keys apart stands behind the bytes that are hashed.
CacheKey KeyOf(uint32_t name, uint32_t spread) {
  CacheKey key;
  key.content_hash.bytes[0] = static_cast<uint8_t>(name & ((1u << spread) - 1));
  for (std::size_t byte = 0; byte < 4; ++byte) key.content_hash.bytes[8 + byte] = static_cast<uint8_t>(name >> 8 * byte);
  return key;
}

void CompareWithMap(uint32_t seed, uint32_t spread) {
  std::mt19937 random(seed);
  KeyTable<Named> table;
  std::map<uint32_t, std::pair<Named*, int>> reference;
  for (int call = 0; call < 20'000; ++call) {
    const uint32_t name = random() % 400;
    const CacheKey key = KeyOf(name, spread);
    const auto known = reference.find(name);
    Named* found = table.Find(key);
    ASSERT_EQ(found, known == reference.end() ? nullptr : known->second.first);
    if (found != nullptr && random() % 2 == 0) {
      ASSERT_EQ(found->value, known->second.second);
      table.Erase(*found);
      reference.erase(known);
    } else {
      const auto [entry, fresh] = table.FindOrMake(key);
      ASSERT_EQ(fresh, found == nullptr);
      ASSERT_EQ(entry->key, key);
      if (fresh) {
        entry->value = call;
        reference.emplace(name, std::pair(entry, call));
      }
    }
    ASSERT_EQ(table.size(), reference.size());
  }
  for (const auto& [name, entry] : reference) ASSERT_EQ(table.Find(KeyOf(name, spread)), entry.first);
}

TEST(KeyTable, follows_a_map) { CompareWithMap(1, 8); }

TEST(KeyTable, keys_of_few_hashes_push_each_other_on) { CompareWithMap(2, 2); }

TEST(KeyTable, keys_of_one_hash_are_told_apart) { CompareWithMap(3, 0); }

TEST(KeyTable, every_field_of_a_key_counts) {
  KeyTable<Named> table;
  CacheKey key = KeyOf(7, 8);
  table.FindOrMake(key);
  for (auto change : std::vector<void (*)(CacheKey&)>{[](CacheKey& k) { k.namespace_id = kPartialPages; },
                                                      [](CacheKey& k) { k.group_id = 1; },
                                                      [](CacheKey& k) { k.page_offset = 1; }}) {
    CacheKey other = key;
    change(other);
    EXPECT_EQ(table.Find(other), nullptr);
  }
  EXPECT_NE(table.Find(key), nullptr);
}

TEST(KeyTable, the_object_erased_last_is_used_first) {
  KeyTable<Named> table;
  Named* const a = table.FindOrMake(KeyOf(1, 8)).first;
  Named* const b = table.FindOrMake(KeyOf(2, 8)).first;
  table.Erase(*a);
  table.Erase(*b);
  EXPECT_EQ(table.FindOrMake(KeyOf(3, 8)).first, b);
  EXPECT_EQ(table.FindOrMake(KeyOf(4, 8)).first, a);
}

}  // namespace
}  // namespace tokenspeed
