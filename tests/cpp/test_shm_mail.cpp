// Messages between ranks: matching order, sizes, and ranks that leave.
#include <numeric>

#include "shm/mail.h"
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

const std::vector<int64_t> kSizes = {0, 1, 64, kLetterBytes, kLetterBytes + 1, 8192, 1'048'577};

Bytes pattern(int64_t bytes, int salt) {
  Bytes data(static_cast<size_t>(bytes));
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<size_t>(salt));
  return data;
}

// A rank with its engine and its mail.
class Office {
 public:
  Office(Host& host, int rank) : engine_(host.engine(rank)), mail_(*engine_, host.segment(rank)) {}

  Engine& engine() { return *engine_; }
  Mail& mail() { return mail_; }
  MessagePtr start_send(int to, int tag, const Bytes& data) {
    return mail_.send(to, tag, std::ssize(data),
                      [&](std::byte* memory) { std::copy(data.begin(), data.end(), memory); });
  }
  void send(int to, int tag, const Bytes& data) { mail_.wait(start_send(to, tag, data), kPatience); }
  MessagePtr start_receive(int from, int tag, Bytes& data) {
    return mail_.receive(from, tag, data.data(), std::ssize(data));
  }
  // The sender.
  int receive(int from, int tag, const Bytes& expected) {
    Bytes data(expected.size());
    const auto message = start_receive(from, tag, data);
    mail_.wait(message, kPatience);
    require(message->problem.empty(), message->problem);
    require(data == expected, "not what was sent");
    return message->source;
  }

 private:
  std::unique_ptr<Engine> engine_;
  Mail mail_;
};

TEST(shm_messages_of_all_sizes_arrive_as_they_were_sent) {
  Host host(3);
  check_ranks(3, [&](int rank) {
    Office office(host, rank);
    for (int round = 0; round < 3; ++round) {
      for (const auto bytes : kSizes) {
        office.send((rank + 1) % 3, 5, pattern(bytes, rank + round));
        office.receive((rank + 2) % 3, 5, pattern(bytes, (rank + 2) % 3 + round));
      }
    }
  });
}

// More messages than a lane holds, from both sides at once, before any receive.
TEST(shm_who_sends_first_on_both_sides_does_not_wait_for_a_receive) {
  Host host(2);
  constexpr int kMany = 3 * static_cast<int>(kLetters);
  check_ranks(2, [&](int rank) {
    Office office(host, rank);
    for (int i = 0; i < kMany; ++i) office.send(1 - rank, i % 4, pattern(i % 3 == 0 ? 5000 : i, i));
    for (int tag = 3; tag >= 0; --tag) {
      for (int i = tag; i < kMany; i += 4) office.receive(1 - rank, tag, pattern(i % 3 == 0 ? 5000 : i, i));
    }
  });
}

TEST(shm_receives_are_matched_in_the_order_in_which_they_were_asked_for) {
  Host host(2);
  check_ranks(2, [&](int rank) {
    Office office(host, rank);
    if (rank == 0) {
      std::vector<Bytes> data(4, Bytes(2000));
      std::vector<MessagePtr> messages;
      for (size_t i = 0; i < data.size(); ++i)
        messages.push_back(office.start_receive(1, static_cast<int>(i) % 2, data[i]));
      office.send(1, 9, {});
      for (size_t i = data.size(); i-- > 0;) office.mail().wait(messages[i], kPatience);
      for (size_t i = 0; i < data.size(); ++i) require(data[i] == pattern(2000, static_cast<int>(i)), "out of order");
    } else {
      office.receive(0, 9, {});
      for (const int i : {1, 0, 3, 2}) office.send(0, i % 2, pattern(2000, i));
    }
  });
}

TEST(shm_a_receive_from_any_rank_says_from_which) {
  Host host(4);
  check_ranks(4, [&](int rank) {
    Office office(host, rank);
    if (rank != 2) {
      for (const int bytes : {8, 9000}) office.send(2, bytes, pattern(bytes, rank));
      return;
    }
    for (const int bytes : {8, 9000}) {
      int sources = 0;
      for (int i = 0; i < 3; ++i) {
        Bytes data(static_cast<size_t>(bytes));
        const auto message = office.start_receive(-1, bytes, data);
        office.mail().wait(message, kPatience);
        require(data == pattern(bytes, message->source), "from another");
        sources |= 1 << message->source;
      }
      require(sources == 0b1011, "each of the others once");
    }
  });
}

TEST(shm_a_message_of_another_size_is_lost_and_the_next_is_not) {
  for (const int64_t bytes : {int64_t{16}, int64_t{70'000}}) {
    Host host(2);
    Office sender(host, 0), receiver(host, 1);
    sender.send(1, 3, pattern(bytes, 1));
    sender.send(1, 3, pattern(bytes, 2));
    Bytes small(8);
    const auto message = receiver.start_receive(0, 3, small);
    CHECK(receiver.mail().poll(message));
    CHECK(has(message->problem, {"recv of 8 bytes from rank 10 (tag 3)", std::to_string(bytes), "same size"}));
    receiver.receive(0, 3, pattern(bytes, 2));
  }
}

TEST(shm_envelopes_are_used_again) {
  Host host(2);
  Office sender(host, 0), receiver(host, 1);
  void* first = nullptr;
  for (int i = 0; i < 10; ++i) {
    const auto data = pattern(100'000, i);
    const auto message = sender.mail().send(1, 0, 100'000, [&](std::byte* memory) {
      first = first == nullptr ? memory : first;
      CHECK(memory == first);
      std::copy(data.begin(), data.end(), memory);
    });
    CHECK(sender.mail().poll(message));
    receiver.receive(0, 0, data);
  }
}

TEST(shm_what_was_sent_can_be_read_when_the_sender_has_left) {
  Host host(2);
  Office receiver(host, 1);
  {
    Office sender(host, 0);
    for (const auto bytes : kSizes) sender.send(1, 0, pattern(bytes, 3));
  }
  host.gone[0] = true;
  for (const auto bytes : kSizes) receiver.receive(0, 0, pattern(bytes, 3));
  Bytes data(4);
  const auto message = receiver.start_receive(0, 0, data);
  CHECK(has(error_of([&] { receiver.mail().wait(message, kPatience); }),
            {"rank 10 has left", "recv of 4 bytes from rank 10 (tag 0)"}));
}

TEST(shm_a_wait_for_the_dead_ends_and_names_them) {
  for (const bool any : {false, true}) {
    Host host(3);
    Office office(host, 1);
    Bytes data(4);
    const auto message = office.start_receive(any ? -1 : 2, 7, data);
    const Later death([&] { host.gone[2] = true; });
    CHECK(has(error_of([&] { office.mail().wait(message, kPatience); }), {"rank 12 died", "recv", "tag 7"}));
    CHECK(has(error_of([&] { office.engine().start({}); }), {"rank 12 died"}));
  }
}

TEST(shm_a_peer_that_gave_up_ends_a_receive_from_it) {
  Host host(2);
  Office office(host, 0), peer(host, 1);
  Bytes data(4);
  const auto message = office.start_receive(1, 0, data);
  CHECK_THROWS(TransportError, peer.engine().give_up("no more"), "no more");
  CHECK(has(error_of([&] { office.mail().wait(message, kPatience); }), {"rank 11 gave up", "recv of 4 bytes"}));
}

TEST(shm_waits_for_messages_keep_their_time_limit) {
  Host host(2);
  Office office(host, 0);
  Bytes data(4);
  const auto received = office.start_receive(1, 2, data);
  CHECK(!office.mail().wait_for(received, milliseconds(30), true));
  std::vector<MessagePtr> sent;
  for (uint64_t i = 0; i <= kLetters; ++i) sent.push_back(office.start_send(1, 0, data));
  CHECK(office.mail().poll(sent[kLetters - 1]));
  CHECK(!office.mail().poll(sent[kLetters]));
  const auto since = Clock::now();
  CHECK(has(error_of([&] { office.mail().wait(sent[kLetters], milliseconds(80)); }),
            {"timed out after 80 ms", "send of 4 bytes to rank 11", "did not call the matching recv"}));
  CHECK(ms_since(since) >= 80);
  CHECK(has(error_of([&] { office.mail().wait(received, kPatience); }), {"has failed before", "timed out"}));
}

TEST(shm_an_interrupt_ends_a_wait_for_a_message) {
  Host host(2);
  Office office(host, 0);
  Bytes data(4);
  const auto message = office.start_receive(1, 2, data);
  {
    const Later interrupt([&] { office.engine().interrupt("enough"); });
    CHECK_EQ(error_of([&] { office.mail().wait(message, kPatience); }), "enough");
  }
  CHECK_EQ(error_of([&] { office.start_send(1, 2, data); }), "enough");
}

TEST(shm_a_forgotten_receive_takes_no_message) {
  Host host(2);
  Office sender(host, 0), receiver(host, 1);
  Bytes data(4);
  const auto message = receiver.start_receive(0, 0, data);
  receiver.mail().forget(message);
  sender.send(1, 0, pattern(4, 1));
  receiver.receive(0, 0, pattern(4, 1));
  CHECK(data == Bytes(4));
}

// A rank that waits for a message also does its part of collectives, and both wake it.
TEST(shm_messages_and_collectives_go_on_side_by_side) {
  Host host(2);
  check_ranks(2, [&](int rank) {
    Office office(host, rank);
    for (int round = 0; round < 20; ++round) {
      Exchange exchange(host, rank, {.numel = 300'007, .salt = static_cast<uint32_t>(round)}, office.engine());
      if (rank == 0) {
        office.receive(1, 0, pattern(9000, round));
        exchange.finish(office.engine());
      } else {
        exchange.finish(office.engine());
        office.send(0, 0, pattern(9000, round));
      }
    }
  });
}

TEST(shm_threads_of_a_rank_share_its_mail) {
  Host host(2);
  check_ranks(2, [&](int rank) {
    Office office(host, rank);
    std::vector<std::string> errors = run_ranks(3, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        office.send(1 - rank, thread, pattern(i * 40, i));
        office.receive(1 - rank, thread, pattern(i * 40, i));
      }
    });
    for (const auto& error : errors) require(error.empty(), error);
  });
}

// --- peers that are not ranks -------------------------------------------------------------------------------------------

class Forger {
 public:
  explicit Forger(Host& host) : host_(host), lanes_(host.segment(0).allocate(2 * sizeof(Lane))) {
    for (int i = 0; i < 2; ++i) new (&lane(i)) Lane{};
    host_.header(0).mail.store(host_.segment(0).offset_of(lanes_));
  }
  Lane& lane(int i) { return static_cast<Lane*>(lanes_)[i]; }
  void post(int64_t bytes, int64_t envelope) {
    lane(1).letters[0].bytes = bytes;
    lane(1).letters[0].envelope = envelope;
    lane(1).posted.store(1);
  }

 private:
  Host& host_;
  void* lanes_;
};

std::string error_of_a_receive(Host& host) {
  Office office(host, 1);
  Bytes data(4);
  return error_of([&] { office.mail().wait(office.start_receive(0, 0, data), kPatience); });
}

TEST(shm_letters_from_outside_of_a_segment_are_refused) {
  const auto end = Host(2).segment(0).bytes();
  const std::vector<std::pair<int64_t, int64_t>> letters = {{-1, 0},
                                                            {kLetterBytes + 1, 0},
                                                            {INT64_MAX, 0},
                                                            {4, -64},
                                                            {4, 64},
                                                            {4, INT64_MIN},
                                                            {4, end},
                                                            {4, end - 64},
                                                            {INT64_MAX, 64},
                                                            {-1, kDataOffset},
                                                            {4, kDataOffset + 1},
                                                            {INT64_MAX - 64, kDataOffset},
                                                            {INT64_MIN, kDataOffset}};
  for (const auto& [bytes, envelope] : letters) {
    Host host(2);
    Forger(host).post(bytes, envelope);
    CHECK(has(error_of_a_receive(host), {"rank 10", "not in its segment"}));
  }
}

TEST(shm_boxes_and_counters_that_can_not_be_are_refused) {
  const auto end = Host(2).segment(0).bytes();
  for (const int64_t offset : {int64_t{-64}, int64_t{64}, end, end - 64, kDataOffset + 8, INT64_MAX, INT64_MIN}) {
    Host host(2);
    host.header(0).mail.store(offset);
    CHECK(has(error_of_a_receive(host), {"rank 10", "outside its segment"}));
  }
  Host host(2);
  Forger(host).lane(1).posted.store(kLetters + 1);
  CHECK(has(error_of_a_receive(host), {"rank 10", "more messages than"}));
}

}  // namespace
}  // namespace torchddp::shm
